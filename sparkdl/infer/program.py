"""A model's forward pass as a list of torch's operations, which runs without the model's code.

[Note: a program of operations] ``torch.export`` finds the operations. Its own files are not used:
``torch.export.load`` evaluates the text of sizes, looks functions up by any name below ``torch`` (such
as ``torch.os.system``), and opens some pickles without restriction. Here the operations are JSON, the
tensors are those of the model's safetensors, and what a program may call is a closed list: operators of
ATen that compute with their arguments alone and check these, and arithmetic of sizes. A forged program
can take time and memory, as a forged number of neurons can, but runs no code and reads no memory but
its own.
"""

from __future__ import annotations

import base64
import json
import logging
import math
import operator
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import safetensors.torch
import torch
from torch import nn

from sparkdl.codec.files import MAX_JSON_BYTES, parse_json
from sparkdl.codec.safe import STORABLE, decode, encode, mapped
from sparkdl.errors import ModelError, counted, in_short
from sparkdl.infer.export import LONGEST, Place, Trial, apart, call, nesting, quiet
from sparkdl.infer.forward import device_of
from sparkdl.infer.manifest import ModelData
from sparkdl.model.preparation import passing_buffers
from sparkdl.process.determinism import seeded

logger = logging.getLogger("sparkdl")
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
_OPERATORS = frozenset(
    """
    abs acos acosh asin asinh atan atan2 atanh ceil cos cosh deg2rad digamma erf erfc erfinv exp
    exp2 expm1 floor frac lgamma log log10 log1p log2 logit neg negative positive rad2deg reciprocal
    round rsqrt sgn sigmoid sign sin sinc sinh sqrt square tan tanh trunc nan_to_num isnan isinf
    isfinite isclose logical_and logical_not logical_or logical_xor bitwise_and bitwise_not
    bitwise_or bitwise_xor bitwise_left_shift bitwise_right_shift celu elu gelu glu hardshrink
    hardsigmoid hardswish hardtanh leaky_relu log_sigmoid mish prelu relu relu6 rrelu selu silu
    softplus softshrink threshold softmax log_softmax add sub subtract rsub mul multiply div divide
    true_divide floor_divide remainder fmod pow float_power hypot maximum minimum fmax fmin eq ne lt
    le gt ge greater greater_equal less less_equal not_equal xlogy logaddexp logaddexp2 lerp clamp
    clamp_min clamp_max clip where addcmul addcdiv copysign heaviside matmul mm bmm mv dot vdot addmm
    addmv addbmm baddbmm linear bilinear einsum outer inner tensordot cdist pairwise_distance
    cosine_similarity linalg_cross cross linalg_norm linalg_vector_norm linalg_vecdot norm
    scaled_dot_product_attention.default sum nansum mean nanmean prod amax amin aminmax max min
    argmax argmin any all std var std_mean var_mean logsumexp logcumsumexp cumsum cumprod cummax
    cummin count_nonzero topk sort argsort kthvalue median diff trace view view_as reshape
    reshape_as flatten unflatten ravel squeeze unsqueeze expand expand_as broadcast_to
    broadcast_tensors permute transpose t numpy_T mT mH movedim moveaxis swapaxes swapdims narrow
    select slice index index_select gather take_along_dim split split_with_sizes chunk tensor_split
    unbind cat concat stack hstack vstack column_stack atleast_1d atleast_2d atleast_3d repeat
    repeat_interleave.self_int tile roll flip unfold im2col col2im diagonal diag diag_embed tril
    triu tril_indices triu_indices meshgrid pixel_shuffle pixel_unshuffle channel_shuffle pad
    constant_pad_nd reflection_pad1d reflection_pad2d reflection_pad3d replication_pad1d
    replication_pad2d replication_pad3d contiguous clone alias detach lift_fresh_copy to type_as
    copy fill zero masked_fill masked_scatter index_put index_fill index_add index_copy scatter
    scatter_add scatter_reduce slice_scatter select_scatter bucketize one_hot zeros zeros_like ones
    ones_like full full_like new_zeros new_ones new_full scalar_tensor arange linspace eye rand
    rand_like randn randn_like bernoulli dropout alpha_dropout feature_dropout conv1d conv2d conv3d
    conv_transpose1d conv_transpose2d conv_transpose3d convolution batch_norm layer_norm group_norm
    instance_norm rms_norm embedding embedding_bag.padding_idx lstm.input gru.input rnn_tanh.input
    rnn_relu.input lstm_cell gru_cell rnn_tanh_cell rnn_relu_cell avg_pool1d avg_pool2d avg_pool3d
    max_pool1d max_pool2d max_pool3d max_pool1d_with_indices max_pool2d_with_indices
    max_pool3d_with_indices adaptive_avg_pool1d adaptive_avg_pool2d adaptive_avg_pool3d
    adaptive_max_pool1d adaptive_max_pool2d adaptive_max_pool3d upsample_nearest1d
    upsample_nearest2d upsample_nearest3d upsample_linear1d upsample_bilinear2d upsample_bicubic2d
    upsample_trilinear3d grid_sampler affine_grid_generator fft_fft fft_ifft fft_rfft fft_irfft
    fft_fft2 fft_ifft2 fft_rfft2 fft_irfft2 complex polar real imag view_as_real view_as_complex
    conj resolve_conj item sym_size sym_numel sym_constrain_range sym_constrain_range_for_size
    __and__ __or__ __xor__ __iand__ __ior__ __ixor__ _assert_scalar _assert_async
    """.split()
)
"""The operators of ATen that a program may call, also in place."""


def _attention(query: Any, key: Any, value: Any, *others: Any, **named: Any) -> Any:
    """Attention, whose kernels trust that there are as many values as keys."""
    if key.shape[:-1] != value.shape[:-1]:
        raise ValueError("attention has other keys than values")
    attention = torch.ops.aten.scaled_dot_product_attention.default
    return attention(query, key, value, *others, **named)


def _bag(
    table: Any, indices: Any, offsets: Any, scale: bool, mode: int, sparse: bool, weights: Any,
    *others: Any,
) -> Any:  # fmt: skip
    """Sums of embeddings, whose kernels trust that bags and weights are those of the indices."""
    fits = weights is None or weights.shape == indices.shape
    if offsets.numel():
        fits &= 0 <= int(offsets.min()) <= int(offsets.max()) <= indices.numel()
    if not fits:
        raise ValueError("a bag of embeddings is not in the list of indices")
    bag = torch.ops.aten.embedding_bag.padding_idx
    return bag(table, indices, offsets, scale, mode, sparse, weights, *others)


def _lstm(
    x: Any, states: Any, weights: Any, biases: bool, layers: int, dropout: float, train: bool,
    both: bool, rows_first: bool,
) -> Any:  # fmt: skip
    """An LSTM, whose kernels trust the shapes and dtypes of its weights and states."""
    sides, hidden, features = 1 + bool(both), states[0].shape[-1], x.shape[-1]
    shapes: list[tuple[int, ...]] = [(layers * sides, x.shape[not rows_first], hidden)] * 2
    for _ in range(min(layers, len(weights))):
        shapes += [
            *((4 * hidden, features), (4 * hidden, hidden)),
            *[(4 * hidden,)] * (2 * bool(biases)),
        ] * sides
        features = hidden * sides
    tensors = [*states, *weights]
    if x.ndim != 3 or [tuple(one.shape) for one in tensors] != shapes:
        raise ValueError("the weights or states of an LSTM have other shapes than it needs")
    states, weights = ([one.to(x.dtype).contiguous() for one in some] for some in (states, weights))
    lstm = torch.ops.aten.lstm.input
    return lstm(x, states, weights, biases, layers, dropout, train, both, rows_first)


_CHECKED: Mapping[str, Callable[..., Any]] = {
    "scaled_dot_product_attention.default": _attention,
    "embedding_bag.padding_idx": _bag,
    "lstm.input": _lstm,
}
"""Operators that read, or write, memory beyond their arguments if these do not fit together."""
_DTYPES = STORABLE | {torch.complex64, torch.complex128}
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
        self.training, self._text = False, text
        content = self._content
        first: dict[str, Any] = {}
        for name, same, kind, dtype, shape in content["tensors"]:
            if same not in first:
                tensor = torch.zeros(shape, dtype=_named("dtype", dtype))
                parameter = kind == "parameter"
                first[same] = nn.Parameter(tensor, requires_grad=False) if parameter else tensor
            self._put(name, first[same], kind)
        for name, data in content["constants"].items():
            (value,) = safetensors.torch.load(base64.b64decode(data)).values()
            self._put(name, value, "passing")

    def _put(self, name: str, tensor: torch.Tensor, kind: str) -> None:
        """Give the module a tensor; a name may be that of an attribute of modules."""
        owner, (*path, last) = self, name.split(".")
        for one in path:
            owner = owner._modules.setdefault(one, nn.Module())  # type: ignore[assignment]
        if kind == "parameter":
            owner._parameters[last] = tensor  # type: ignore[assignment]
        else:
            owner._buffers[last] = tensor
        if kind == "passing":
            owner._non_persistent_buffers_set.add(last)

    @property
    def _content(self) -> dict[str, Any]:
        content = parse_json(self._text.encode())
        for operation in content["operations"]:
            operation[1] = _function(operation[1])
            operation[2:4] = decode(operation[2:4], {}, _of_leaf)
        return content  # type: ignore[no-any-return]

    def __getstate__(self) -> dict[str, Any]:
        return {name: it for name, it in vars(self).items() if name != "_ready"}

    def _get_name(self) -> str:
        return f"Program of {parse_json(self._text.encode())['name']}"

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
        names = content["keywords"][len(inputs) :]
        if len(inputs) + len(names) != len(content["inputs"]) or named.keys() != {*names}:
            wanted = ", ".join(content["keywords"]) or counted(len(content["inputs"]), "tensor")
            raise ModelError(f"the {self._get_name()} takes {wanted}. {_REMEDY}")
        inputs = (*inputs, *(named[name] for name in names))
        self._check(content, inputs)
        device = device_of(self) if content["uses"] else inputs[0].device
        known = {
            **dict(self.named_parameters(remove_duplicate=False)),
            **dict(self.named_buffers(remove_duplicate=False)),
        }
        values = {name: known[target] for name, target in content["uses"].items()}
        values |= dict(zip((name for name, *_ in content["inputs"]), inputs, strict=True))

        def read(value: Any) -> Any:
            return values[value.name] if isinstance(value, _Value) else device

        for name, function, args, kwargs, ended in content["operations"]:
            args, kwargs = mapped([args, kwargs], (_Value, _Place), read)
            values[name] = function(*args, **kwargs)
            for one in ended:
                del values[one]
        return mapped(decode(content["returns"], {}, _of_leaf), (_Value, _Place), read)

    def _check(self, content: Mapping[str, Any], inputs: Sequence[Any]) -> None:
        """Raise ModelError for inputs that the operations are not for."""
        sizes: dict[str, int] = {}
        if content["default"] != str(torch.get_default_dtype()):
            raise ModelError(
                f"the {self._get_name()} was made where torch's default dtype is {content['default']}, "
                f"and it is {torch.get_default_dtype()} here: call torch.set_default_dtype."
            )
        for (name, dtype, dims), tensor in zip(content["inputs"], inputs, strict=True):
            fits = tensor.ndim == len(dims) and str(tensor.dtype) == dtype
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
                    f'the {self._get_name()} takes "{name}" of shape [{shape}] in {dtype}, and gets '
                    f"one of {list(tensor.shape)} in {tensor.dtype}. {_REMEDY}"
                )


def _function(name: str) -> Callable[..., Any]:
    """Return what an operation may call. Raises ValueError."""
    return _CHECKED.get(name) or _NUMBERS.get(name) or _operator(name)


def _operator(name: str) -> Callable[..., Any]:
    """Return an operator of ATen that a program may call. Raises ValueError."""
    base, _, overload = name.partition(".")
    listed = not {base, base.removesuffix("_"), name}.isdisjoint(_OPERATORS)
    if not listed or overload == "out" or overload.endswith("_out"):
        raise ValueError(f"a program may not call {name!r}")
    operator = getattr(getattr(torch.ops.aten, base, None), overload, None)
    if not isinstance(operator, torch._ops.OpOverload):
        raise ValueError(
            f"the program calls {name!r}, which torch {torch.__version__} does not have"
        )
    return operator


def _name_of(function: Any) -> str:
    """Return the name by which :func:`_function` finds a function. Raises ModelError."""
    name = getattr(function, "__name__", str(function))
    if _NUMBERS.get(name) is function:
        return str(name)
    name = str(function).removeprefix("aten.")
    try:
        if _operator(name) is function:
            return name
    except ValueError:
        pass
    raise ModelError(
        f"its forward pass calls {function}, which is not among what a program may call."
    )


_KINDS: Mapping[str, type] = {
    "dtype": torch.dtype,
    "layout": torch.layout,
    "memory_format": torch.memory_format,
}


def _named(kind: str, name: str) -> Any:
    """Return a dtype, a layout or a memory format by its name. Raises ValueError."""
    value = getattr(torch, name, None)
    if not isinstance(value, _KINDS[kind]) or (
        value not in _DTYPES if kind == "dtype" else kind == "layout" and value != torch.strided
    ):
        raise ValueError(f"a program has no {kind} {name!r}")
    return value


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
    return _named(kind, text)


def _listed(value: Any) -> Any:
    """Return nested arguments of an operation, with plain lists and dicts."""
    if isinstance(value, (list, tuple)):
        return [_listed(item) for item in value]
    if isinstance(value, Mapping):
        return {key: _listed(item) for key, item in value.items()}
    return value


class _Called(nn.Module):
    """The module as a function of tensors that returns tensors; ``returned`` gets their nesting."""

    def __init__(self, trained: ModelData, returned: list[Any]) -> None:
        super().__init__()
        self.module = trained.module
        # a method, since some versions of torch watch lists that a module has
        self._names, self._note = trained.signature.inputs, returned.append

    def forward(self, *inputs: Any) -> Any:
        """Return the tensors in what the module returns."""
        leaves: list[Any] = []
        self._note(nesting(call(self.module, self._names, inputs), leaves))
        return tuple(leaves)


def operations(trained: ModelData) -> str:
    """Return the text of a :class:`Program` that predicts what the module does.

    Raises :class:`ModelError`, which says why there is none.
    """
    try:
        with torch.no_grad(), quiet(), seeded(0):
            trial = Trial.of(apart(trained))
            content = _traced(apart(trained), trial)
            lengths = [
                dim
                for *_, dims in content["inputs"]
                for dim in dims
                if isinstance(dim, list) and dim[0] != "rows"
            ]
            least = max((dim[1] for dim in lengths), default=0)
            while least > 1 and trial.takes(least - 1):  # torch wants results of two elements
                least -= 1
            for dim in lengths:
                dim[1] = min(dim[1], least)
            text = json.dumps(content)
            if not _compare(trial, text):
                logger.warning(
                    "without its code, the model will return something else for rows that have no "
                    "elements: leave such rows out, or load it with its code."
                )
    except ModelError:
        raise
    except Exception as error:
        raise ModelError(f"{in_short(error)}.") from error
    if len(text) > MAX_JSON_BYTES // 2:
        raise ModelError(f"it has {len(text):,} characters.")
    return text


def _traced(trained: ModelData, trial: Trial) -> dict[str, Any]:
    returned: list[Any] = []
    inputs = trial.inputs
    shapes = tuple(dict.fromkeys(some, torch.export.Dim.AUTO) for some in trial.free)
    program = torch.export.export(
        _Called(trained, returned), tuple(inputs), dynamic_shapes=(shapes,), strict=False
    )
    dims = trial.dims_of(program)
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
            uses[spec.arg.name] = name = f"constant {len(constants)}"
            value = program.constants[str(spec.target)].detach().contiguous()
            constants[name] = base64.b64encode(safetensors.torch.save({"": value})).decode()
        elif spec.kind.name in ("PARAMETER", "BUFFER"):
            uses[spec.arg.name] = str(spec.target).removeprefix("module.")
        else:
            raise ModelError(f"it has an input of the kind {spec.kind.name}.")
    (results,) = program.graph.output_node().args
    # what is asserted of dtypes need not hold where precision= changes them
    checks = torch.ops.aten._assert_tensor_metadata.default
    steps = [n for n in program.graph.nodes if n.op == "call_function" and n.target is not checks]
    last = {use.name: node.name for node in steps for use in node.all_input_nodes}
    kept, ended = {one.name for one in results if isinstance(one, torch.fx.Node)}, defaultdict(list)
    for name, end in last.items():
        if name not in kept:
            ended[end].append(name)
    return {
        "name": type(trained.module).__name__,
        "keywords": trained.signature.inputs,
        "default": str(torch.get_default_dtype()),
        "inputs": [
            (name, str(tensor.dtype), dims)
            for name, tensor, dims in zip(places, inputs, dims, strict=True)
        ],
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
            mapped(returned[-1], Place, lambda place: results[place.number]),
            "what it returns",
            leaf=_leaf,
        ),
    }


def _compare(trial: Trial, text: str) -> bool:
    """Raise an error where the program and the module differ on batches of several sizes.

    Return whether they agree on rows without elements, too.
    """
    program, module = Program(text), trial.trained.module
    buffers = {name: buffer.clone() for name, buffer in module.named_buffers()}
    tensors = {name: buffers.get(name, one) for name, one in module.state_dict().items()}
    program.load_state_dict(tensors, strict=True, assign=True)  # without a copy of the weights
    for name in passing_buffers(module):
        program._put(name, buffers[name], "passing")
    lengths = {
        dim[2] + 1
        for _, _, dims in program._content["inputs"]
        for dim in dims
        if isinstance(dim, list) and dim[2] is not None and dim[2] < LONGEST
    }  # that the module may take, and the program does not
    trial.compare(lambda inputs: program(*inputs), [*trial.sizes, *((2, n) for n in lengths)])
    try:
        trial.compare(lambda inputs: program(*inputs), [(2, 0)])
    except Exception:
        return False
    return True
