"""Every module of PyTorch's own tests (module_db): made, run, differentiated, saved, copied and moved.

A module's arguments are generated on the CPU and copied to each side. Unless a check is about making modules on a
device, a module is made on the CPU and moved, so that its parameters are drawn from the CPU's generator on both sides;
then everything is seeded anew, for what it draws as it runs.
"""

from __future__ import annotations

import copy
import inspect
import io
import pickle
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.nn.parameter import is_lazy
from torch.nn.utils.rnn import PackedSequence
from torch.testing._internal.common_modules import FunctionInput, ModuleErrorEnum, ModuleInfo, module_db
from torch.utils._pytree import register_pytree_node, tree_leaves, tree_map

from .call import Call, seed_all, seed_of
from .cases import Case, chosen, gradients, noncontiguous, run_cases, second_gradients, tensors_of
from .observe import Action
from .parts import At, Found, How

# Packed sequences are arguments and results as lists are. The batch sizes stay on the CPU wherever the data is.
register_pytree_node(
    PackedSequence,
    lambda packed: ([packed.data, packed.sorted_indices, packed.unsorted_indices], packed.batch_sizes),
    lambda leaves, sizes: PackedSequence(leaves[0], sizes, leaves[1], leaves[2]),
)

DTYPES = ("float32", "float64")
CHECKS = ("construct", "forward", "backward", "double_backward", "inplace", "noncontiguous", "state", "errors")
MAY_REFUSE = ("errors", "double_backward")  # not every loss has second derivatives
MODULES: dict[str, ModuleInfo] = {info.name: info for info in module_db}


def names(dtype: str) -> list[str]:
    return [name for name, info in MODULES.items() if getattr(torch, dtype) in info.dtypes]


class Made:
    """A module on the call's device, with the arguments of its forward()."""

    def __init__(self, info: ModuleInfo, call: Call, dtype: torch.dtype, training: bool, seed: int) -> None:
        self.device = call.device
        self.seed = seed
        args, kwargs, self.args, self.kwargs = call.args
        self.module = info.module_cls(*args, **kwargs).to(call.device, dtype).train(training)
        if not any(map(is_lazy, self.module.parameters())):
            self.module._apply(torch.clone)  # or the buffers would be as old as they were before they moved

    def run(self, module: torch.nn.Module | None = None) -> Any:
        seed_all(self.seed)
        return (module or self.module)(*self.args, **self.kwargs)

    def inputs(self) -> list[torch.Tensor]:
        """Everything that may have a gradient; of a lazy module only after it has run."""
        return [t for t in [*tensors_of((self.args, self.kwargs)), *self.module.parameters()] if t.requires_grad]


def state(module: torch.nn.Module) -> list[torch.Tensor]:
    """Its parameters and buffers, as far as it has made them."""
    return [t for t in [*module.parameters(), *module.buffers()] if not is_lazy(t)]


def forward(made: Made) -> Any:
    return made.run(), state(made.module)


def backward(made: Made) -> Any:
    result = made.run()
    return gradients(result, made.inputs())


def double_backward(made: Made) -> Any:
    result = made.run()
    return second_gradients(result, made.inputs())


def in_place(made: Made) -> Any:
    """On copies, for a leaf with a gradient cannot be written; the module's result is its input."""
    leaves = made.inputs()
    made.args, made.kwargs = tree_map(_clone, (made.args, made.kwargs))
    result = made.run()
    return result, tensors_of((made.args, made.kwargs)), gradients(result, leaves)


def strided_backward(made: Made) -> Any:
    result = made.run()
    return result, gradients(result, made.inputs(), steps=True)


def _saved(value: Any) -> Any:
    file = io.BytesIO()
    torch.save(value, file)
    file.seek(0)
    return torch.load(file, weights_only=not isinstance(value, torch.nn.Module))


def from_state_dict(made: Made) -> Any:
    """Another module, of other numbers, that loads what torch.save wrote."""
    made.run()  # statistics move, lazy parameters are made
    other = copy.deepcopy(made.module)
    with torch.no_grad():
        for t in state(other):
            t.zero_()
    keys = other.load_state_dict(_saved(made.module.state_dict()))
    return str(keys), made.run(other), state(other)


def deep_copied(made: Made) -> Any:
    made.run()
    other = copy.deepcopy(made.module)
    return made.run(other), state(other), state(made.module)


def pickled(made: Made) -> Any:
    made.run()
    other = pickle.loads(pickle.dumps(made.module))
    return made.run(other), state(other)


def saved(made: Made) -> Any:
    made.run()
    other = _saved(made.module)
    return made.run(other), state(other)


def moved(made: Made) -> Any:
    """To the CPU and back, by way of another dtype: parameters stay the objects that they are."""
    made.run()
    before = [id(p) for p in made.module.parameters()]
    made.module.to("cpu").double().to(made.device).float()._apply(torch.clone)
    same = before == [id(p) for p in made.module.parameters()]
    made.args, made.kwargs = tree_map(_to_float, (made.args, made.kwargs))
    return same, made.run(), state(made.module)


def _clone(leaf: Any) -> Any:
    return leaf.clone() if isinstance(leaf, torch.Tensor) else leaf


def _to_float(leaf: Any) -> Any:
    return leaf.detach().float() if isinstance(leaf, torch.Tensor) and leaf.is_floating_point() else leaf


#: check -> case -> what is done with a module that has been made and moved.
DONE: dict[str, dict[str, Callable[[Made], Any]]] = {
    "forward": {"": forward},
    "backward": {"": backward},
    "double_backward": {"": double_backward},
    "inplace": {"": in_place},
    "noncontiguous": {"": strided_backward},
    "state": {
        "state_dict": from_state_dict,
        "deepcopy": deep_copied,
        "pickle": pickled,
        "torch.save": saved,
        "to": moved,
    },
}


def _takes(info: ModuleInfo, argument: str) -> bool:
    return argument in inspect.signature(info.module_cls.__init__).parameters


def _made_there(info: ModuleInfo, dtype: torch.dtype, factory: bool) -> Action:
    """Makes the module on the device, by device= or where the default device says so."""

    def action(call: Call) -> Any:
        args, kwargs, _, _ = call.args
        if factory:
            return state(info.module_cls(*args, **{**kwargs, "device": call.device, "dtype": dtype}))
        with torch.device(call.device):
            return state(info.module_cls(*args, **kwargs))

    return action


def _arguments(construct: FunctionInput, forward: FunctionInput | None) -> tuple[Any, ...]:
    given = forward or FunctionInput()
    return (construct.args, construct.kwargs, given.args, given.kwargs)


def _for(check: str, arguments: tuple[Any, ...]) -> tuple[Any, ...]:
    """The arguments that a check wants."""
    construct, by_name, *given = arguments
    if check == "inplace":
        by_name = {**by_name, "inplace": True}
    if check == "noncontiguous":
        given = noncontiguous(given)
    return (construct, by_name, *given)


def _errors(info: ModuleInfo, dtype: torch.dtype, training: bool) -> Iterator[tuple[tuple[Any, ...], Action]]:
    if info.module_error_inputs_func is None:
        return
    wrong = info.module_error_inputs_func(info, device="cpu", dtype=dtype, requires_grad=False, training=training)
    for error in wrong:
        given = error.module_error_input

        def action(call: Call, runs: bool = error.error_on == ModuleErrorEnum.FORWARD_ERROR) -> Any:
            made = Made(info, call, dtype, training, 0)
            return made.run() if runs else None

        yield _arguments(given.constructor_input, given.forward_input), action


def _cases(info: ModuleInfo, training: bool, how: How, found: Found) -> Iterator[Case]:
    dtype = getattr(torch, how.dtype)
    mode = "train" if training else "eval"
    seed_all(seed_of(info.name))
    inputs = info.module_inputs_func(info, device="cpu", dtype=dtype, requires_grad=True, training=training)
    for index, given in chosen(list(inputs), how, found):
        seed = seed_of(info.name, index)
        words = f"{mode} {index} {given.desc}".rstrip()
        plain = _arguments(given.constructor_input, given.forward_input)
        if not any(isinstance(leaf, torch.nn.Module) for leaf in tree_leaves(plain)):  # that is on the CPU already
            for factory in (False, True) if _takes(info, "device") else (False,):
                way = "device=" if factory else "default device"
                yield Case("construct", f"{words}, {way}", plain, _made_there(info, dtype, factory), seed)
        for check, kinds in DONE.items():
            if check == "inplace" and not _takes(info, "inplace"):
                continue
            arguments = _for(check, plain)
            for kind, do in kinds.items():

                def action(call: Call, do: Callable[[Made], Any] = do, seed: int = seed) -> Any:
                    return do(Made(info, call, dtype, training, seed))

                yield Case(check, f"{words} {kind}".rstrip(), arguments, action, seed)
    for number, (arguments, action) in enumerate(_errors(info, dtype, training)):
        yield Case("errors", f"{mode}, call {number}", arguments, action, seed_of(info.name, number))


def run(name: str, how: How, at: At) -> Found:
    info, found = MODULES[name], Found()
    for training in (True, False) if info.train_and_eval_differ else (True,):
        run_cases(_cases(info, training, how, found), how, at, found)
    return found
