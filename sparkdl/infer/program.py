"""A model's forward pass as a list of torch's operations, which runs without the model's code.

[Note: a program of operations] ``torch.export`` finds the operations. Its own files are not used:
``torch.export.load`` evaluates the text of sizes, looks functions up by any name below ``torch`` (such
as ``torch.os.system``), and opens some pickles without restriction. Here the operations are JSON, the
tensors are those of the model's safetensors, and what a program may call is a closed list: operators of
ATen that compute with their arguments alone, and arithmetic of sizes.
"""

from __future__ import annotations

import base64
import contextlib
import io
import itertools
import json
import math
import operator
import re
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import safetensors.torch
import torch
from torch import nn

from sparkdl.codec.files import MAX_JSON_BYTES, parse_json
from sparkdl.codec.safe import decode, encode, mapped
from sparkdl.errors import ModelError
from sparkdl.infer.export import free_dims, quiet, samples, told
from sparkdl.infer.forward import device_of
from sparkdl.infer.manifest import ModelData
from sparkdl.model.preparation import passing_buffers
from sparkdl.model.recipe import parts_of
from sparkdl.process.determinism import seeded
from sparkdl.replica.compute import buffers_kept, evaluating

_NUMBERS: Mapping[str, Callable[..., Any]] = {
    one.__name__: one
    for one in (
        *(operator.add, operator.sub, operator.mul, operator.floordiv, operator.truediv),
        *(operator.mod, operator.neg, operator.eq, operator.ne, operator.lt, operator.le),
        *(operator.gt, operator.ge, operator.and_, operator.or_, operator.getitem),
        *(math.ceil, math.floor, math.trunc),
        *(torch.sym_int, torch.sym_float, torch.sym_max, torch.sym_min, torch.sym_not),
    )
}
"""The functions of sizes that a program may call, and that which takes one of several results."""
_CHECKS = ("_assert_scalar", "_assert_async", "_assert_tensor_metadata")
_REFUSED = re.compile(
    "^_|from_file|^set|resize|empty|data$|unsafe|sparse|smm|nested|quantiz|fbgemm|mkldnn|cudnn|miopen|"
    "mps|vulkan|overrideable|backward|jvp|requires_grad|retain|pin_memory"
)
"""Operators of ATen that no program calls: they read files or memory that nobody has written, take
addresses, or trust what they are given more than others do."""
_LENGTHS = (7, 3, 67)
"""Lengths of rows to try the model on, which hardly any other size equals: the first that it takes."""
_ROWS = 5
_SIZES = (2, 3, 4, 5, 6, 7, 8, 11, 16, 31, 64, 97, 1000, 65537)
_REMEDY = "Load the model with its code: model=make_model, or trust=True if you trust the folder."


@dataclass(frozen=True)
class _Value:
    """The result of an operation, or an input, by its name."""

    name: str


@dataclass(frozen=True)
class _Place:
    """The device on which the program runs."""


class Program(nn.Module):
    """The forward pass of a model, for predictions: its operations, and tensors to be loaded.

    ``text`` is what :func:`operations` returns.
    """

    def __init__(self, text: str) -> None:
        super().__init__()
        self.training, self.text = False, text
        content = self._content
        first: dict[str, Any] = {}
        for name, same, kind, dtype, shape in content["tensors"]:
            if same not in first:
                tensor = torch.empty(shape, dtype=_dtype(dtype))
                parameter = kind == "parameter"
                first[same] = nn.Parameter(tensor, requires_grad=False) if parameter else tensor
            *path, last = name.split(".")
            owner: nn.Module = self
            for part in path:
                owner = owner._modules.setdefault(part, nn.Module())  # type: ignore[assignment]
            if kind == "parameter":
                owner._parameters[last] = first[same]
            else:
                owner.register_buffer(last, first[same], persistent=kind == "buffer")
        for name, data in content["constants"].items():
            (value,) = safetensors.torch.load(base64.b64decode(data)).values()
            self.register_buffer(name, value, persistent=False)

    @property
    def _content(self) -> dict[str, Any]:
        content = parse_json(self.text.encode())
        for operation in content["operations"]:
            operation[1] = _function(operation[1])
            operation[2:4] = decode(operation[2:4], {}, _of_leaf)
        return content  # type: ignore[no-any-return]

    def __getstate__(self) -> dict[str, Any]:
        return {name: it for name, it in vars(self).items() if name != "_ready"}

    def _get_name(self) -> str:
        return f"Program of {parse_json(self.text.encode())['name']}"

    def train(self, mode: bool = True) -> Program:
        """Refuse to train: dropout and batch norms are those of predictions."""
        if mode:
            raise ModelError(
                f"the model is a {self._get_name()} without its code, which predicts and does not "
                f"train. {_REMEDY}"
            )
        return self

    def forward(self, *inputs: Any, **named: Any) -> Any:
        """Call the operations."""
        if "_ready" not in vars(self):
            object.__setattr__(self, "_ready", self._content)
        content: dict[str, Any] = vars(self)["_ready"]
        inputs = (*inputs, *(named[name] for name in content["keywords"][len(inputs) :]))
        self._check(content, inputs)
        device = device_of(self) if content["uses"] else inputs[0].device
        known = {
            **dict(self.named_parameters(remove_duplicate=False)),
            **dict(self.named_buffers(remove_duplicate=False)),
        }
        values = {name: known[target] for name, target in content["uses"].items()}
        values |= dict(zip((name for name, _ in content["inputs"]), inputs, strict=True))

        def read(value: Any) -> Any:
            return values[value.name] if isinstance(value, _Value) else device

        for name, function, args, kwargs, ended in content["operations"]:
            args, kwargs = mapped([args, kwargs], (_Value, _Place), read)
            values[name] = function(*args, **kwargs)
            for one in ended:
                del values[one]
        return mapped(decode(content["returns"], {}, _of_leaf), (_Value, _Place), read)

    def _check(self, content: Mapping[str, Any], inputs: Sequence[Any]) -> None:
        """Raise ModelError for inputs whose shapes the operations are not for."""
        sizes: dict[str, int] = {}
        for (name, dims), tensor in zip(content["inputs"], inputs, strict=True):
            fits = tensor.ndim == len(dims)
            for size, dim in zip(tensor.shape, dims, strict=False):
                symbol, least, most = dim if isinstance(dim, list) else ("", dim, dim)
                fits &= least <= size and (most is None or size <= most)
                fits &= not symbol or sizes.setdefault(symbol, size) == size
            if not fits:
                shape = ", ".join(
                    str(dim) if isinstance(dim, int) else f"{dim[1]} to {dim[2] or 'any'}"
                    for dim in dims
                )
                raise ModelError(
                    f'the {self._get_name()} takes "{name}" of shape [{shape}], and gets one of '
                    f"{list(tensor.shape)}. {_REMEDY}"
                )


def _function(name: str) -> Callable[..., Any]:
    """Return what an operation may call. Raises ValueError."""
    if name in _NUMBERS:
        return _NUMBERS[name]
    base, _, overload = name.partition(".")
    if base in _CHECKS or not (_REFUSED.search(base) or overload.endswith("out")):
        found = getattr(getattr(torch.ops.aten, base, None), overload, None)
        if isinstance(found, torch._ops.OpOverload):
            return found
    raise ValueError(f"a program may not call {name!r}")


def _name_of(function: Any) -> str:
    """Return the name by which :func:`_function` finds a function. Raises ValueError."""
    name = getattr(function, "__name__", str(function))
    if _NUMBERS.get(name) is function:
        return str(name)
    name = str(function).removeprefix("aten.")
    if _function(name) is not function:
        raise ValueError(f"a program may not call {function}")
    return name


def _dtype(name: str) -> torch.dtype:
    found = getattr(torch, name)
    if not isinstance(found, torch.dtype):
        raise ValueError(f"there is no dtype {name!r}")
    return found


_KINDS: Mapping[str, type] = {
    "dtype": torch.dtype,
    "layout": torch.layout,
    "memory_format": torch.memory_format,
}


def _leaf(value: Any, where: str) -> Any:
    """Return an argument of an operation as JSON. Raises TypeError."""
    if isinstance(value, torch.fx.Node):
        return {"value": value.name}
    if isinstance(value, torch.device):
        return {"place": ""}
    for kind, of in _KINDS.items():
        if isinstance(value, of):
            return {kind: str(value).removeprefix("torch.")}
    raise TypeError(f"{where} is a {type(value).__name__}")


def _of_leaf(content: Any) -> Any:
    """Return the argument that :func:`_leaf` wrote."""
    ((kind, text),) = content.items()
    if kind == "value":
        return _Value(text)
    if kind == "place":
        return _Place()
    found = getattr(torch, text)
    if not isinstance(found, _KINDS[kind]):
        raise ValueError(f"there is no {kind} {text!r}")
    return found


def _listed(value: Any) -> Any:
    """Return nested arguments of an operation, with plain lists and dicts."""
    if isinstance(value, (list, tuple)):
        return [_listed(item) for item in value]
    if isinstance(value, Mapping):
        return {key: _listed(item) for key, item in value.items()}
    return value


class _Called(nn.Module):
    """The module as a function of tensors that returns tensors; ``returned`` becomes their nesting."""

    def __init__(self, trained: ModelData, returned: list[Any]) -> None:
        super().__init__()
        self.module = trained.module
        self._names, self._returned = trained.signature.inputs, returned

    def forward(self, *inputs: Any) -> Any:
        """Return the tensors in what the module returns."""
        leaves: list[Any] = []
        self._returned[:] = [_nesting(_call(self.module, self._names, inputs), leaves)]
        return tuple(leaves)


def _call(module: nn.Module, names: Sequence[str], inputs: Sequence[Any]) -> Any:
    return module(**dict(zip(names, inputs, strict=True))) if names else module(*inputs)


def _nesting(value: Any, leaves: list[Any]) -> Any:
    """Return plain nested values, with places in ``leaves`` for tensors and without other objects."""
    if isinstance(value, (torch.Tensor, torch.SymInt)):
        leaves.append(value)
        return _Value(str(len(leaves) - 1))
    if isinstance(value, (list, tuple)) and not hasattr(value, "_asdict"):
        nested = [_nesting(item, leaves) for item in value]
        return tuple(nested) if isinstance(value, tuple) else nested
    if parts := parts_of(value):
        return {str(name): _nesting(part, leaves) for name, part in parts.items()}
    return value if value is None or type(value) in (bool, int, float, str) else None


def operations(trained: ModelData) -> str:
    """Return the text of a :class:`Program` that predicts what the module does.

    Raises :class:`ModelError`, which says why there is none.
    """
    module = trained.module
    try:
        with evaluating(module), buffers_kept(module), quiet(), seeded(0):
            shown = _shown(trained)
            text = _traced(trained, *shown)
            _compare(trained, text, *shown)
    except ModelError:
        raise
    except Exception as error:
        raise ModelError(f"{told(error).rstrip('.')}.") from error
    if len(text) > MAX_JSON_BYTES // 2:
        raise ModelError(f"it has {len(text):,} characters.")
    return text


def _shown(trained: ModelData) -> tuple[int, int]:
    """Return a length of rows that the module takes, and what its integers are in these."""
    for length, number in (tries := [*itertools.product(_LENGTHS, (1, 0))]):
        try:
            inputs = samples(trained, _ROWS, length, number)
            _call(trained.module, trained.signature.inputs, inputs)
            return length, number
        except Exception:
            if (length, number) == tries[-1]:
                raise
    raise AssertionError


def _traced(trained: ModelData, length: int, number: int) -> str:
    returned: list[Any] = []
    inputs = samples(trained, _ROWS, length, number)
    free = free_dims(inputs, samples(trained, _ROWS + 1, length + 1))
    shapes = tuple(dict.fromkeys(some, torch.export.Dim.AUTO) for some in free)
    with contextlib.redirect_stderr(io.StringIO()):  # torch prints the graph where it fails
        program = torch.export.export(
            _Called(trained, returned), tuple(inputs), dynamic_shapes=(shapes,), strict=False
        )
    tensors: list[Any] = []
    first: dict[int, str] = {}
    named = [
        *(("parameter", *one) for one in trained.module.named_parameters(remove_duplicate=False)),
        *(("buffer", *one) for one in trained.module.named_buffers(remove_duplicate=False)),
    ]
    passing = passing_buffers(trained.module)
    for kind, name, tensor in named:
        same = first.setdefault(id(tensor), name)
        kind = "passing" if name in passing else kind
        tensors.append([name, same, kind, str(tensor.dtype)[6:], list(tensor.shape)])
    uses: dict[str, str] = {}
    constants: dict[str, str] = {}
    places: list[str] = []
    signature = program.graph_signature
    for spec in signature.input_specs:
        if spec.kind.name == "USER_INPUT":
            places.append(spec.arg.name)
        elif spec.kind.name == "CONSTANT_TENSOR":
            uses[spec.arg.name] = name = f"constant_{len(constants)}"
            value = program.constants[str(spec.target)].detach().contiguous()
            constants[name] = base64.b64encode(safetensors.torch.save({"": value})).decode()
        elif spec.kind.name in ("PARAMETER", "BUFFER"):
            uses[spec.arg.name] = str(spec.target).removeprefix("module.")
        else:
            raise ModelError(f"it has an input of the kind {spec.kind.name}.")
    if changed := [spec.target for spec in signature.output_specs if spec.target is not None]:
        raise ModelError(f'its forward pass changes "{str(changed[0]).removeprefix("module.")}".')
    nodes = {node.name: node for node in program.graph.nodes}
    dims = [_dims(nodes[name], some) for name, some in zip(places, free, strict=True)]
    _check_sizes([nodes[name].meta["val"].shape for name in places])
    (results,) = nodes["output"].args
    steps = [node for node in program.graph.nodes if node.op == "call_function"]
    last = {use.name: node.name for node in steps for use in node.all_input_nodes}
    kept, ended = {one.name for one in results if isinstance(one, torch.fx.Node)}, defaultdict(list)
    for name, end in last.items():
        if name not in kept:
            ended[end].append(name)
    return json.dumps(
        {
            "name": type(trained.module).__name__,
            "keywords": trained.signature.inputs,
            "inputs": list(zip(places, dims, strict=True)),
            "tensors": tensors,
            "constants": constants,
            "uses": uses,
            "operations": [
                [
                    node.name,
                    _name_of(node.target),
                    encode(_listed(node.args), node.name, leaf=_leaf),
                    encode(_listed(node.kwargs), node.name, leaf=_leaf),
                    ended[node.name],
                ]
                for node in steps
            ],
            "returns": encode(
                mapped(returned[0], _Value, lambda value: results[int(value.name)]),
                "what it returns",
                leaf=_leaf,
            ),
        }
    )


def _dims(node: torch.fx.Node, free: Sequence[int]) -> list[Any]:
    """Return the dimensions of an input: a length, or [symbol, least, most]; rows are the same in all.

    Raises ModelError where the forward pass has made a constant of one.
    """
    dims: list[Any] = []
    for place, size in enumerate(node.meta["val"].shape):
        symbol = _symbol(size)
        if not symbol and place in free:  # a constant, or it depends on another one
            what = "the length of rows" if place else "the number of rows"
            raise ModelError(f"its forward pass has made a constant of {what}.")
        if not symbol:
            dims.append(int(size))
            continue
        known = size.node.shape_env.var_to_range[symbol]
        least, most = int(known.lower), known.upper
        bounds = 0 if least <= 2 else least, int(most) if most.is_Integer else None
        dims.append([str(symbol) if place else "rows", *bounds])
    return dims


def _symbol(size: Any) -> Any:
    """Return the symbol of a size that varies, or None."""
    expression = size.node.expr if isinstance(size, torch.SymInt) else None
    return expression if getattr(expression, "is_symbol", False) else None


def _check_sizes(shapes: Sequence[Any]) -> None:
    """Raise ModelError if the forward pass goes another way for some sizes of its inputs."""
    rows = [symbol for shape in shapes if (symbol := _symbol(shape[0])) is not None]
    for guard in shapes[0][0].node.shape_env.guards if rows else ():
        relation = shapes[0][0].node.shape_env.replace(guard.expr)
        relation = relation.subs(dict.fromkeys(rows, rows[0]))
        if relation.is_Relational and not (_is_range(relation) or _always(relation)):
            raise ModelError(f"its forward pass goes another way by sizes: {relation}.")


def _is_range(relation: Any) -> bool:
    """Return whether a relation of sizes only bounds one of them."""
    bounds = relation.rel_op in ("<", "<=", ">", ">=")
    return bounds and len(relation.free_symbols) == 1 and all(one.is_Atom for one in relation.args)


def _always(relation: Any) -> bool:
    """Return whether a relation holds for any sizes of two or more, as far as some of them show."""
    symbols = sorted(relation.free_symbols, key=str)
    return len(symbols) < 3 and all(
        bool(relation.subs(dict(zip(symbols, sizes, strict=True))))
        for sizes in itertools.product(_SIZES, repeat=len(symbols))
    )


def _compare(trained: ModelData, text: str, length: int, number: int) -> None:
    """Raise an error where the program and the module differ on batches of several sizes."""
    program = Program(text)
    program.load_state_dict(trained.module.state_dict(), strict=True)
    for name, buffer in passing_buffers(trained.module).items():
        program.get_buffer(name).copy_(buffer)
    for rows, size in ((_ROWS, length), (1, length), (_ROWS + 2, length + 1), (2, 1)):
        inputs = samples(trained, rows, size, number)
        try:
            with seeded(0):
                expected = _call(trained.module, trained.signature.inputs, inputs)
        except Exception:  # too short for it
            continue
        expected = trained.signature.output(expected)
        with seeded(0):
            found = trained.signature.output(program(*inputs))
        pair: tuple[list[Any], list[Any]] = ([], [])
        for one, leaves in zip((found, expected), pair, strict=True):
            _nesting(one, leaves)
        torch.testing.assert_close(*pair, equal_nan=True)
