// msgpack, only what the records need: a writer into a growing byte buffer and a bounds-checked reader.
//
// The msgpack package is not used here because records are written and read once per operator, in C++ without the GIL.
// The format is the public one (tests read our traffic with the plain msgpack package), in its shortest encodings.
#pragma once

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <new>
#include <stdexcept>
#include <string>
#include <string_view>
#include <vector>

namespace dtorch {

// A byte buffer that keeps its capacity between uses and never zeroes what it grows by.
class Buffer {
 public:
  ~Buffer() { std::free(data_); }
  Buffer() = default;
  Buffer(const Buffer&) = delete;
  Buffer& operator=(const Buffer&) = delete;
  Buffer(Buffer&& o) noexcept : data_(o.data_), size_(o.size_), cap_(o.cap_) { o.data_ = nullptr, o.size_ = o.cap_ = 0; }

  const uint8_t* data() const { return data_; }
  uint8_t* data() { return data_; }
  size_t size() const { return size_; }
  bool empty() const { return size_ == 0; }
  void clear() { size_ = 0; }
  void truncate(size_t n) { size_ = n; }

  // Room for n more bytes; the caller writes them and then calls advance().
  uint8_t* reserve(size_t n) {
    if (__builtin_expect(size_ + n > cap_, 0)) grow(n);
    return data_ + size_;
  }
  void advance(size_t n) { size_ += n; }
  void append(const void* p, size_t n) {
    std::memcpy(reserve(n), p, n);
    size_ += n;
  }
  void push(uint8_t b) { *reserve(1) = b, ++size_; }

 private:
  void grow(size_t n) {
    size_t want = cap_ ? cap_ * 2 : 256;
    while (want < size_ + n) want *= 2;
    void* p = std::realloc(data_, want);
    if (!p) throw std::bad_alloc();
    data_ = static_cast<uint8_t*>(p);
    cap_ = want;
  }
  uint8_t* data_ = nullptr;
  size_t size_ = 0, cap_ = 0;
};

namespace mp {

inline uint8_t* be16(uint8_t* p, uint16_t v) { v = __builtin_bswap16(v); std::memcpy(p, &v, 2); return p + 2; }
inline uint8_t* be32(uint8_t* p, uint32_t v) { v = __builtin_bswap32(v); std::memcpy(p, &v, 4); return p + 4; }
inline uint8_t* be64(uint8_t* p, uint64_t v) { v = __builtin_bswap64(v); std::memcpy(p, &v, 8); return p + 8; }

inline void put_uint(Buffer& b, uint64_t v) {
  uint8_t* p = b.reserve(9);
  if (v < 128) { *p = static_cast<uint8_t>(v); b.advance(1); }
  else if (v <= 0xff) { p[0] = 0xcc, p[1] = static_cast<uint8_t>(v); b.advance(2); }
  else if (v <= 0xffff) { *p = 0xcd; be16(p + 1, static_cast<uint16_t>(v)); b.advance(3); }
  else if (v <= 0xffffffffu) { *p = 0xce; be32(p + 1, static_cast<uint32_t>(v)); b.advance(5); }
  else { *p = 0xcf; be64(p + 1, v); b.advance(9); }
}

inline void put_int(Buffer& b, int64_t v) {
  if (v >= 0) return put_uint(b, static_cast<uint64_t>(v));
  uint8_t* p = b.reserve(9);
  if (v >= -32) { *p = static_cast<uint8_t>(v); b.advance(1); }
  else if (v >= INT8_MIN) { p[0] = 0xd0, p[1] = static_cast<uint8_t>(v); b.advance(2); }
  else if (v >= INT16_MIN) { *p = 0xd1; be16(p + 1, static_cast<uint16_t>(v)); b.advance(3); }
  else if (v >= INT32_MIN) { *p = 0xd2; be32(p + 1, static_cast<uint32_t>(v)); b.advance(5); }
  else { *p = 0xd3; be64(p + 1, static_cast<uint64_t>(v)); b.advance(9); }
}

inline void put_nil(Buffer& b) { b.push(0xc0); }
inline void put_bool(Buffer& b, bool v) { b.push(v ? 0xc3 : 0xc2); }

inline void put_double(Buffer& b, double v) {
  uint64_t bits;
  std::memcpy(&bits, &v, 8);
  uint8_t* p = b.reserve(9);
  *p = 0xcb;
  be64(p + 1, bits);
  b.advance(9);
}

inline void put_array(Buffer& b, size_t n) {
  uint8_t* p = b.reserve(5);
  if (n < 16) { *p = static_cast<uint8_t>(0x90 | n); b.advance(1); }
  else if (n <= 0xffff) { *p = 0xdc; be16(p + 1, static_cast<uint16_t>(n)); b.advance(3); }
  else { *p = 0xdd; be32(p + 1, static_cast<uint32_t>(n)); b.advance(5); }
}

inline void put_str(Buffer& b, std::string_view s) {
  uint8_t* p = b.reserve(5);
  if (s.size() < 32) { *p = static_cast<uint8_t>(0xa0 | s.size()); b.advance(1); }
  else if (s.size() <= 0xff) { p[0] = 0xd9, p[1] = static_cast<uint8_t>(s.size()); b.advance(2); }
  else if (s.size() <= 0xffff) { *p = 0xda; be16(p + 1, static_cast<uint16_t>(s.size())); b.advance(3); }
  else { *p = 0xdb; be32(p + 1, static_cast<uint32_t>(s.size())); b.advance(5); }
  b.append(s.data(), s.size());
}

inline void put_bin_header(Buffer& b, size_t n) {
  uint8_t* p = b.reserve(5);
  if (n <= 0xff) { p[0] = 0xc4, p[1] = static_cast<uint8_t>(n); b.advance(2); }
  else if (n <= 0xffff) { *p = 0xc5; be16(p + 1, static_cast<uint16_t>(n)); b.advance(3); }
  else { *p = 0xc6; be32(p + 1, static_cast<uint32_t>(n)); b.advance(5); }
}

inline void put_bin(Buffer& b, const void* data, size_t n) {
  put_bin_header(b, n);
  b.append(data, n);
}

inline void put_ext(Buffer& b, int8_t type, const void* data, size_t n) {
  uint8_t* p = b.reserve(6);
  if (n == 1 || n == 2 || n == 4 || n == 8 || n == 16) {
    p[0] = static_cast<uint8_t>(0xd4 + __builtin_ctzll(n)), p[1] = static_cast<uint8_t>(type);
    b.advance(2);
  } else if (n <= 0xff) {
    p[0] = 0xc7, p[1] = static_cast<uint8_t>(n), p[2] = static_cast<uint8_t>(type);
    b.advance(3);
  } else if (n <= 0xffff) {
    *p = 0xc8; be16(p + 1, static_cast<uint16_t>(n)); p[3] = static_cast<uint8_t>(type);
    b.advance(4);
  } else {
    *p = 0xc9; be32(p + 1, static_cast<uint32_t>(n)); p[5] = static_cast<uint8_t>(type);
    b.advance(6);
  }
  b.append(data, n);
}

// What the next value is, as far as a reader must tell them apart.
enum class Kind : uint8_t { Nil, Bool, Int, Float, Str, Bin, Array, Map, Ext };

struct FormatError : std::runtime_error {
  using std::runtime_error::runtime_error;
};

// Reads values one after the other from memory it does not own. Every read checks the bounds and the type, and throws
// FormatError: bytes from a peer are never trusted.
class Reader {
 public:
  Reader(const void* data, size_t n) : p_(static_cast<const uint8_t*>(data)), end_(p_ + n) {}

  bool done() const { return p_ >= end_; }
  const uint8_t* pos() const { return p_; }
  size_t left() const { return static_cast<size_t>(end_ - p_); }

  Kind kind() const {
    need(1);
    uint8_t c = *p_;
    if (c < 0x80 || c >= 0xe0) return Kind::Int;
    if (c < 0x90) return Kind::Map;
    if (c < 0xa0) return Kind::Array;
    if (c < 0xc0) return Kind::Str;
    switch (c) {
      case 0xc0: return Kind::Nil;
      case 0xc2: case 0xc3: return Kind::Bool;
      case 0xc4: case 0xc5: case 0xc6: return Kind::Bin;
      case 0xca: case 0xcb: return Kind::Float;
      case 0xd9: case 0xda: case 0xdb: return Kind::Str;
      case 0xdc: case 0xdd: return Kind::Array;
      case 0xde: case 0xdf: return Kind::Map;
      case 0xcc: case 0xcd: case 0xce: case 0xcf: case 0xd0: case 0xd1: case 0xd2: case 0xd3: return Kind::Int;
      default: return Kind::Ext;
    }
  }

  bool try_nil() {
    need(1);
    if (*p_ != 0xc0) return false;
    ++p_;
    return true;
  }

  int64_t integer() {
    need(1);
    uint8_t c = *p_;
    if (__builtin_expect(c < 0x80, 1)) { ++p_; return c; }
    return long_integer(c);
  }
  uint64_t uint() { return static_cast<uint64_t>(integer()); }

  bool boolean() {
    need(1);
    if (*p_ != 0xc2 && *p_ != 0xc3) fail("a boolean");
    return *p_++ == 0xc3;
  }

  double real() {
    need(1);
    if (*p_ == 0xcb) {
      need(9);
      uint64_t bits = load64(p_ + 1);
      p_ += 9;
      double v;
      std::memcpy(&v, &bits, 8);
      return v;
    }
    if (*p_ == 0xca) {
      need(5);
      uint32_t bits = load32(p_ + 1);
      p_ += 5;
      float v;
      std::memcpy(&v, &bits, 4);
      return v;
    }
    return static_cast<double>(integer());
  }

  size_t array() {
    need(1);
    uint8_t c = *p_;
    if (c >= 0x90 && c < 0xa0) { ++p_; return c & 15; }
    if (c == 0xdc) { need(3); p_ += 3; return load16(p_ - 2); }
    if (c == 0xdd) { need(5); p_ += 5; return load32(p_ - 4); }
    fail("an array");
  }

  std::string_view str() {
    need(1);
    uint8_t c = *p_;
    size_t n;
    if (c >= 0xa0 && c < 0xc0) { n = c & 31; p_ += 1; }
    else if (c == 0xd9) { need(2); n = p_[1]; p_ += 2; }
    else if (c == 0xda) { need(3); n = load16(p_ + 1); p_ += 3; }
    else if (c == 0xdb) { need(5); n = load32(p_ + 1); p_ += 5; }
    else fail("a string");
    return take(n);
  }

  std::string_view bin() {
    need(1);
    size_t n;
    if (*p_ == 0xc4) { need(2); n = p_[1]; p_ += 2; }
    else if (*p_ == 0xc5) { need(3); n = load16(p_ + 1); p_ += 3; }
    else if (*p_ == 0xc6) { need(5); n = load32(p_ + 1); p_ += 5; }
    else fail("binary data");
    return take(n);
  }

  std::string_view ext(int8_t* type) {
    need(1);
    uint8_t c = *p_;
    size_t n;
    if (c >= 0xd4 && c <= 0xd8) { need(2); n = size_t{1} << (c - 0xd4); *type = static_cast<int8_t>(p_[1]); p_ += 2; }
    else if (c == 0xc7) { need(3); n = p_[1]; *type = static_cast<int8_t>(p_[2]); p_ += 3; }
    else if (c == 0xc8) { need(4); n = load16(p_ + 1); *type = static_cast<int8_t>(p_[3]); p_ += 4; }
    else if (c == 0xc9) { need(6); n = load32(p_ + 1); *type = static_cast<int8_t>(p_[5]); p_ += 6; }
    else fail("an extension");
    return take(n);
  }

  // Steps over one value, nested ones included.
  void skip() {
    size_t left = 1;
    while (left--) {
      need(1);
      uint8_t c = *p_;
      if (c < 0x80 || c >= 0xe0) { ++p_; continue; }
      if (c < 0x90) { left += 2 * static_cast<size_t>(c & 15); ++p_; continue; }
      if (c < 0xa0) { left += c & 15; ++p_; continue; }
      if (c < 0xc0) { take_skip(1 + (c & 31)); continue; }
      switch (c) {
        case 0xc0: case 0xc2: case 0xc3: ++p_; break;
        case 0xcc: case 0xd0: take_skip(2); break;
        case 0xcd: case 0xd1: take_skip(3); break;
        case 0xce: case 0xd2: case 0xca: take_skip(5); break;
        case 0xcf: case 0xd3: case 0xcb: take_skip(9); break;
        case 0xc4: case 0xd9: need(2); take_skip(2 + size_t{p_[1]}); break;
        case 0xc5: case 0xda: need(3); take_skip(3 + size_t{load16(p_ + 1)}); break;
        case 0xc6: case 0xdb: need(5); take_skip(5 + size_t{load32(p_ + 1)}); break;
        case 0xc7: need(2); take_skip(3 + size_t{p_[1]}); break;
        case 0xc8: need(3); take_skip(4 + size_t{load16(p_ + 1)}); break;
        case 0xc9: need(5); take_skip(6 + size_t{load32(p_ + 1)}); break;
        case 0xd4: take_skip(3); break;
        case 0xd5: take_skip(4); break;
        case 0xd6: take_skip(6); break;
        case 0xd7: take_skip(10); break;
        case 0xd8: take_skip(18); break;
        case 0xdc: need(3); left += load16(p_ + 1); p_ += 3; break;
        case 0xdd: need(5); left += load32(p_ + 1); p_ += 5; break;
        case 0xde: need(3); left += 2 * size_t{load16(p_ + 1)}; p_ += 3; break;
        case 0xdf: need(5); left += 2 * size_t{load32(p_ + 1)}; p_ += 5; break;
        default: fail("a value");
      }
    }
  }

 private:
  int64_t long_integer(uint8_t c) {
    if (c >= 0xe0) { ++p_; return static_cast<int8_t>(c); }
    switch (c) {
      case 0xcc: need(2); p_ += 2; return p_[-1];
      case 0xcd: need(3); p_ += 3; return load16(p_ - 2);
      case 0xce: need(5); p_ += 5; return load32(p_ - 4);
      case 0xcf: case 0xd3: need(9); p_ += 9; return static_cast<int64_t>(load64(p_ - 8));
      case 0xd0: need(2); p_ += 2; return static_cast<int8_t>(p_[-1]);
      case 0xd1: need(3); p_ += 3; return static_cast<int16_t>(load16(p_ - 2));
      case 0xd2: need(5); p_ += 5; return static_cast<int32_t>(load32(p_ - 4));
      default: fail("an integer");
    }
  }
  static uint16_t load16(const uint8_t* p) { uint16_t v; std::memcpy(&v, p, 2); return __builtin_bswap16(v); }
  static uint32_t load32(const uint8_t* p) { uint32_t v; std::memcpy(&v, p, 4); return __builtin_bswap32(v); }
  static uint64_t load64(const uint8_t* p) { uint64_t v; std::memcpy(&v, p, 8); return __builtin_bswap64(v); }

  void need(size_t n) const {
    if (__builtin_expect(static_cast<size_t>(end_ - p_) < n, 0)) ends_early();
  }
  void take_skip(size_t n) { need(n); p_ += n; }
  std::string_view take(size_t n) {
    need(n);
    std::string_view v(reinterpret_cast<const char*>(p_), n);
    p_ += n;
    return v;
  }
  // Out of line, and so the checks themselves are inlined everywhere.
  [[noreturn, gnu::cold, gnu::noinline]] static void ends_early() { throw FormatError("msgpack: the message ends too early"); }
  [[noreturn, gnu::cold, gnu::noinline]] void fail(const char* want) const {
    char text[64];
    std::snprintf(text, sizeof text, "msgpack: expected %s, found byte 0x%02x", want, *p_);
    throw FormatError(text);
  }

  const uint8_t* p_;
  const uint8_t* end_;
};

}  // namespace mp
}  // namespace dtorch
