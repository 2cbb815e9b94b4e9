"""Small and realistic training graphs, built by differentiating a list of forward ops.

Each generator writes the forward ops of a network family with the sizes and the saved
values that PyTorch's own formulas have; :class:`Network` then appends the backward ops:
one per forward op, which reads the incoming gradients and what was saved, and writes
one gradient per differentiable input and one for the op's parameters. Gradients of a
value with several readers are summed by ops of their own.
"""

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from remat.core.graph import Op, Phase, Role, Storage, TrainingGraph

KIB = 1024
RNG_REASON = "it draws the state of the random number generator"


@dataclass(frozen=True, slots=True)
class Instance:
    """A training graph, and the forward ops at which its blocks begin."""

    graph: TrainingGraph
    block_starts: tuple[int, ...] = ()

    @property
    def name(self) -> str:
        return self.graph.name


@dataclass(slots=True)
class Call:
    """A forward op and what its backward needs."""

    op: Op
    differentiable: tuple[int, ...]
    saved: tuple[int, ...]
    parameter: int | None
    is_sum: bool = False


@dataclass(slots=True)
class Network:
    """Collects forward ops; :meth:`instance` appends the backward ones."""

    name: str
    storages: list[Storage] = field(default_factory=list)
    calls: list[Call] = field(default_factory=list)
    block_starts: list[int] = field(default_factory=list)

    def storage(self, name: str, size_bytes: int, role: Role = Role.ACTIVATION) -> int:
        is_resident = role in {Role.PARAMETER, Role.BUFFER, Role.INPUT}
        self.storages.append(
            Storage(
                name=name, size_bytes=size_bytes, role=role, is_resident=is_resident
            )
        )
        return len(self.storages) - 1

    def input(self, name: str, size_bytes: int) -> int:
        return self.storage(name, size_bytes, Role.INPUT)

    def start_block(self) -> None:
        """Remember that a block (a layer that users would checkpoint) begins here."""
        self.block_starts.append(len(self.calls))

    def call(
        self,
        name: str,
        reads: Sequence[int],
        sizes: Sequence[int] | int,
        cost_ns: int,
        *,
        saves_inputs: Sequence[int] | bool = False,
        saves_outputs: Sequence[int] = (),
        parameter_bytes: int = 0,
        parameter: int | None = None,
        workspace_bytes: int = 0,
        constant: Sequence[int] = (),
        once: str | None = None,
    ) -> tuple[int, ...]:
        """Append a forward op; ``saves_outputs`` are positions among its outputs.

        ``parameter`` is one that another op has as well.
        """
        sizes = (sizes,) if isinstance(sizes, int) else tuple(sizes)
        outputs = tuple(
            self.storage(f"{name}.{i}" if i else name, size)
            for i, size in enumerate(sizes)
        )
        if parameter_bytes:
            parameter = self.storage(f"{name}.weight", parameter_bytes, Role.PARAMETER)
        if saves_inputs is True:
            saves_inputs = list(reads)
        saved = [*(saves_inputs or ()), *(outputs[i] for i in saves_outputs)]
        op = Op(
            name=name,
            reads=(*dict.fromkeys(reads), *([] if parameter is None else [parameter])),
            writes=outputs,
            cost_ns=(cost_ns,),
            workspace_bytes=(workspace_bytes,),
            phase=Phase.FORWARD,
            non_recomputable=once,
            is_ordered=once is not None,
        )
        differentiable = tuple(
            s
            for s in dict.fromkeys(reads)
            if s not in constant and self.storages[s].role is Role.ACTIVATION
        )
        self.calls.append(
            Call(op, differentiable, tuple(dict.fromkeys(saved)), parameter)
        )
        return outputs

    def one(
        self, name: str, reads: Sequence[int], size: int, cost_ns: int, **kw
    ) -> int:
        return self.call(name, reads, size, cost_ns, **kw)[0]

    def add(self, name: str, reads: Sequence[int], size: int) -> int:
        """Append a sum; its backward is no op, the gradient is that of every term."""
        total = self.one(name, reads, size, size)
        self.calls[-1] = replace(self.calls[-1], is_sum=True)
        return total

    def instance(self, output: int) -> Instance:
        """Return the training graph whose forward output is storage ``output``."""
        tangent = self.storage(
            "tangent", self.storages[output].size_bytes, Role.TANGENT
        )
        backward = _Backward(self, {output: [tangent]})
        for call in reversed(self.calls):
            backward.append(call)
        graph = TrainingGraph(
            name=self.name,
            storages=tuple(self.storages),
            ops=(*(call.op for call in self.calls), *backward.ops),
            forward_outputs=(output,),
            tangents=(tangent,),
            final_outputs=tuple(backward.parameter_gradients),
        )
        return Instance(graph, tuple(self.block_starts))


@dataclass(slots=True)
class _Backward:
    network: Network
    pending: dict[int, list[int]]
    ops: list[Op] = field(default_factory=list)
    gradient_of_parameter: dict[int, int] = field(default_factory=dict)

    @property
    def parameter_gradients(self) -> list[int]:
        return list(self.gradient_of_parameter.values())

    def gradient_of(self, storage: int) -> int | None:
        """Return the summed gradient of a storage; append the sums it needs."""
        parts = self.pending.pop(storage, [])
        while len(parts) > 1:
            first, second, *rest = parts
            source = self.network.storages[storage]
            total = self.network.storage(
                f"sum of gradients of {source.name}", source.size_bytes, Role.GRADIENT
            )
            self.add(
                f"sum {source.name}",
                (first, second),
                (total,),
                1 + source.size_bytes // 2,
            )
            parts = [total, *rest]
        return parts[0] if parts else None

    def add(
        self,
        name: str,
        reads: Sequence[int],
        writes: Sequence[int],
        cost_ns: int,
        workspace_bytes: int = 0,
    ) -> None:
        self.ops.append(
            Op(
                name=name,
                reads=tuple(dict.fromkeys(reads)),
                writes=tuple(writes),
                cost_ns=(cost_ns,),
                workspace_bytes=(workspace_bytes,),
                phase=Phase.BACKWARD,
            )
        )

    def append(self, call: Call) -> None:
        network = self.network
        incoming = [g for s in call.op.writes if (g := self.gradient_of(s)) is not None]
        if not incoming:
            return
        if call.is_sum:
            for storage in call.differentiable:
                self.pending.setdefault(storage, []).extend(incoming)
            return
        writes: list[int] = []
        for storage in call.differentiable:
            source = network.storages[storage]
            gradient = network.storage(
                f"gradient of {source.name}", source.size_bytes, Role.GRADIENT
            )
            self.pending.setdefault(storage, []).append(gradient)
            writes.append(gradient)
        reads = [*incoming, *call.saved]
        cost_ns = call.op.cost_ns[0] or 0
        if call.parameter is not None:
            weight = network.storages[call.parameter]
            gradient = network.storage(
                f"gradient of {weight.name}", weight.size_bytes, Role.GRADIENT
            )
            writes.append(gradient)
            reads.append(call.parameter)
            cost_ns *= 2
        if writes:
            self.add(
                f"{call.op.name} backward",
                reads,
                writes,
                cost_ns,
                call.op.workspace_bytes[0],
            )
        if call.parameter is not None:
            self.accumulate(call.parameter, writes[-1])

    def accumulate(self, parameter: int, gradient: int) -> None:
        """Add to the gradient of a parameter what one more op gives."""
        earlier = self.gradient_of_parameter.get(parameter)
        if earlier is not None:
            weight = self.network.storages[parameter]
            total = self.network.storage(
                f"summed gradient of {weight.name}", weight.size_bytes, Role.GRADIENT
            )
            self.add(f"sum {weight.name}", (earlier, gradient), (total,), 1)
            gradient = total
        self.gradient_of_parameter[parameter] = gradient


def mlp_chain(layers: int = 6, width_bytes: int = 64 * KIB) -> Instance:
    """Matrix products and activations, one after the other, of equal size."""
    net = Network(f"mlp-{layers}")
    x = net.input("x", width_bytes)
    for layer in range(layers):
        net.start_block()
        x = net.one(
            f"linear{layer}",
            [x],
            width_bytes,
            4 * width_bytes,
            saves_inputs=True,
            parameter_bytes=width_bytes // 4,
        )
        x = net.one(f"relu{layer}", [x], width_bytes, width_bytes, saves_outputs=[0])
    return net.instance(net.one("loss", [x], 4, width_bytes, saves_inputs=True))


def _convolution(net: Network, name: str, x: int, size: int, cost_ns: int) -> int:
    return net.one(
        f"{name}.conv",
        [x],
        size,
        cost_ns,
        saves_inputs=True,
        parameter_bytes=max(64, size // 16),
        workspace_bytes=size // 2,
    )


def _norm(net: Network, name: str, x: int, size: int) -> int:
    outputs = net.call(
        f"{name}.norm",
        [x],
        (size, 256, 256),
        2 * size,
        saves_inputs=True,
        saves_outputs=[1, 2],
        parameter_bytes=512,
    )
    return outputs[0]


def _relu(net: Network, name: str, x: int, size: int) -> int:
    return net.one(f"{name}.relu", [x], size, size // 2, saves_outputs=[0])


def _conv_norm_relu(net: Network, name: str, x: int, size: int, cost_ns: int) -> int:
    x = _convolution(net, name, x, size, cost_ns)
    return _relu(net, name, _norm(net, name, x, size), size)


def _classifier(net: Network, x: int, size: int) -> Instance:
    pooled = net.one("pool", [x], 4 * KIB, size)
    loss = net.one(
        "head", [pooled], 4, 8 * KIB, saves_inputs=True, parameter_bytes=16 * KIB
    )
    return net.instance(loss)


def resnet_like(blocks: int = 8, size_bytes: int = 256 * KIB) -> Instance:
    """Residual blocks of two convolutions with batch norms; sizes halve at times."""
    net = Network(f"resnet-{blocks}")
    size, cost_ns = size_bytes, 10 * size_bytes
    x = net.input("images", size_bytes // 4)
    x = _conv_norm_relu(net, "stem", x, size, cost_ns)
    for block in range(blocks):
        net.start_block()
        name = f"block{block}"
        halves = block % 4 == 3
        size = size // 2 if halves else size
        y = _conv_norm_relu(net, f"{name}.a", x, size, cost_ns)
        y = _norm(net, name, _convolution(net, f"{name}.b", y, size, cost_ns), size)
        if halves:
            x = _convolution(net, f"{name}.shortcut", x, size, cost_ns // 4)
        x = net.add(f"{name}.add", [y, x], size)
        x = _relu(net, name, x, size)
    return _classifier(net, x, size)


def transformer_like(
    layers: int = 4, size_bytes: int = 128 * KIB, *, dropout: bool = True
) -> Instance:
    """Pre-norm transformer blocks; dropout replays a generator state drawn once.

    Parameters
    ----------
    layers
        Number of blocks.
    size_bytes
        Size of the residual stream; the inner layer is four times as wide.
    dropout
        Whether each block draws a generator state (an ordered op that may run only
        once) and drops out the attention's output.
    """
    net = Network(f"transformer-{layers}")
    size = size_bytes
    tokens = net.input("tokens", size // 64)
    x = net.one("embed", [tokens], size, size, parameter_bytes=2 * size)
    for layer in range(layers):
        net.start_block()
        x = _attention(net, f"layer{layer}", x, size, dropout=dropout)
        x = _feed_forward(net, f"layer{layer}", x, size)
    x = _layer_norm(net, "final", x, size)
    logits = net.one(
        "logits", [x], 4 * size, 40 * size, saves_inputs=True, parameter_bytes=2 * size
    )
    losses = net.call("loss", [logits], (4, 4 * size), 8 * size, saves_outputs=[1])
    return net.instance(losses[0])


def _layer_norm(net: Network, name: str, x: int, size: int) -> int:
    outputs = net.call(
        f"{name}.norm",
        [x],
        (size, size // 64),
        size,
        saves_inputs=True,
        saves_outputs=[1],
        parameter_bytes=512,
    )
    return outputs[0]


def _attention(net: Network, name: str, x: int, size: int, *, dropout: bool) -> int:
    y = _layer_norm(net, f"{name}.1", x, size)
    qkv = net.one(
        f"{name}.qkv",
        [y],
        3 * size,
        30 * size,
        saves_inputs=True,
        parameter_bytes=size // 2,
    )
    y = net.call(
        f"{name}.attention",
        [qkv],
        (size, size // 32),
        25 * size,
        saves_inputs=True,
        saves_outputs=[0, 1],
        workspace_bytes=size // 4,
    )[0]
    y = net.one(
        f"{name}.project",
        [y],
        size,
        10 * size,
        saves_inputs=True,
        parameter_bytes=size // 4,
    )
    if dropout:
        state = net.one(f"{name}.rng_state", [], 16, 100, once=RNG_REASON)
        y = net.call(
            f"{name}.dropout",
            [y, state],
            (size, size // 4),
            size,
            saves_outputs=[1],
            constant=[state],
        )[0]
    return net.add(f"{name}.add1", [x, y], size)


def _feed_forward(net: Network, name: str, x: int, size: int) -> int:
    y = _layer_norm(net, f"{name}.2", x, size)
    y = net.one(
        f"{name}.widen",
        [y],
        4 * size,
        40 * size,
        saves_inputs=True,
        parameter_bytes=size,
    )
    y = net.one(f"{name}.gelu", [y], 4 * size, 6 * size, saves_inputs=True)
    y = net.one(
        f"{name}.narrow",
        [y],
        size,
        40 * size,
        saves_inputs=True,
        parameter_bytes=size,
    )
    return net.add(f"{name}.add2", [x, y], size)


def densenet_like(
    blocks: int = 2, layers: int = 6, size_bytes: int = 64 * KIB
) -> Instance:
    """Dense blocks: every layer reads the concatenation of all before it.

    Parameters
    ----------
    blocks
        Number of dense blocks.
    layers
        Layers per block.
    size_bytes
        Size of what each layer of the first block adds; halves from block to block.
    """
    net = Network(f"densenet-{blocks}x{layers}")
    size = size_bytes
    x = _convolution(net, "stem", net.input("images", size), 2 * size, 10 * size)
    for block in range(blocks):
        net.start_block()
        parts, total = [x], net.storages[x].size_bytes
        for layer in range(layers):
            name = f"block{block}.layer{layer}"
            joined = net.one(f"{name}.cat", parts, total, total // 2)
            y = _relu(net, name, _norm(net, name, joined, total), total)
            y = _conv_norm_relu(net, f"{name}.a", y, 4 * size, 8 * total)
            parts.append(_convolution(net, f"{name}.b", y, size, 36 * size))
            total += size
        joined = net.one(f"block{block}.cat", parts, total, total // 2)
        size //= 2
        x = _convolution(net, f"block{block}.transition", joined, 2 * size, total)
    return _classifier(net, x, 2 * size)


def unet_like(depth: int = 3, size_bytes: int = 256 * KIB) -> Instance:
    """An encoder and a decoder joined by a long connection at every scale."""
    net = Network(f"unet-{depth}")
    size = size_bytes
    x = net.input("images", size // 8)
    skips: list[int] = []
    for level in range(depth):
        net.start_block()
        x = _conv_norm_relu(net, f"down{level}.a", x, size, 9 * size_bytes)
        x = _conv_norm_relu(net, f"down{level}.b", x, size, 9 * size_bytes)
        skips.append(x)
        size //= 2
        x = net.one(f"down{level}.pool", [x], size // 2, size, saves_inputs=True)
    net.start_block()
    x = _conv_norm_relu(net, "bottom", x, size, 9 * size_bytes)
    for level in reversed(range(depth)):
        net.start_block()
        size *= 2
        x = net.one(
            f"up{level}", [x], size, 4 * size, saves_inputs=True, parameter_bytes=KIB
        )
        x = net.one(f"up{level}.cat", [skips[level], x], 2 * size, size)
        x = _conv_norm_relu(net, f"up{level}.a", x, size, 9 * size_bytes)
    return _classifier(net, x, size)


def joined_towers(
    layers: Sequence[int] = (5, 5),
    *,
    is_shared: bool = True,
    stem: int = 0,
    trunk: int = 0,
    size_bytes: int = 64 * KIB,
) -> Instance:
    """Towers that meet, as in a siamese network, between a stem and a trunk.

    Parameters
    ----------
    layers
        Layers of each tower.
    is_shared
        Whether layers at the same depth have one parameter.
    stem, trunk
        Layers before the towers and after they meet.
    size_bytes
        Size of each value; the last of each tower is 64 bytes.
    """
    net = Network(f"towers-{'+'.join(map(str, layers))}-{stem}-{trunk}")
    weights: dict[int, int] = {}

    def layer(name: str, x: int, depth: int, size: int = size_bytes) -> int:
        if depth not in weights or not is_shared:
            weights[depth] = net.storage(f"{name}.weight", KIB, Role.PARAMETER)
        (y,) = net.call(
            f"{name}.linear",
            [x],
            size,
            20 * size_bytes,
            saves_inputs=True,
            parameter=weights[depth],
        )
        return net.one(f"{name}.tanh", [y], size, size_bytes, saves_outputs=[0])

    x: int | None = None
    for depth in range(stem):
        source = net.input("x", size_bytes) if x is None else x
        x = layer(f"stem{depth}", source, -1 - depth)
    tops: list[int] = []
    for tower, count in enumerate(layers):
        y = net.input(f"x{tower}", size_bytes) if x is None else x
        for depth in range(count):
            size = size_bytes if depth + 1 < count or trunk else 64
            y = layer(f"tower{tower}.{depth}", y, depth, size)
        tops.append(y)
    if trunk:
        y = net.one("meet", tops, size_bytes, size_bytes, saves_inputs=True)
        for depth in range(trunk):
            y = layer(f"trunk{depth}", y, 100 + depth)
        tops = [y]
    return net.instance(net.one("loss", tops, 4, 64, saves_inputs=True))


def once_only() -> Instance:
    """A large value that can be computed once, and cheap ops that depend on it."""
    net = Network("once-only")
    x = net.input("x", KIB)
    for layer in range(3):
        noise = net.one(f"noise{layer}", [x], 8 * KIB, 50, once=RNG_REASON)
        x = net.one(
            f"mix{layer}",
            [x, noise],
            8 * KIB,
            20 * KIB,
            saves_inputs=True,
            parameter_bytes=KIB,
            constant=[noise],
        )
        x = net.one(f"tanh{layer}", [x], 8 * KIB, KIB, saves_outputs=[0])
    return net.instance(net.one("loss", [x], 4, KIB, saves_inputs=True))


def awkward_sizes(seed: int = 0, op_count: int = 12) -> Instance:
    """A random layered network with sizes of 0, 1, co-prime and 2^40 bytes.

    Costs are nearly tied, so that a solver that compares floating-point numbers
    carelessly goes wrong here.
    """
    generator = random.Random(seed)
    net = Network(f"awkward-{seed}")
    values = [net.input("x", 1)]
    for index in range(op_count):
        reads = generator.sample(values, min(len(values), generator.randint(1, 3)))
        outputs = net.call(
            f"op{index}",
            reads,
            [
                generator.choice([0, 1, 7, 1_009, 65_537, 2**40])
                for _ in range(generator.randint(1, 2))
            ],
            1_000_000_000 + generator.randint(0, 1),
            saves_inputs=generator.random() < 0.7,
            saves_outputs=[0] if generator.random() < 0.5 else [],
            parameter_bytes=generator.choice([0, 0, 5]),
            workspace_bytes=generator.choice([0, 3, 2**20]),
        )
        values.extend(outputs)
    return net.instance(net.one("loss", values[-4:], 1, 1, saves_inputs=True))


INSTANCES: dict[str, Callable[[], Instance]] = {
    "mlp": mlp_chain,
    "resnet": resnet_like,
    "transformer": transformer_like,
    "densenet": densenet_like,
    "unet": unet_like,
    "siamese": joined_towers,
    "once-only": once_only,
    "awkward-0": lambda: awkward_sizes(0),
    "awkward-1": lambda: awkward_sizes(1),
    "awkward-2": lambda: awkward_sizes(2),
}
"""Name -> generator of the instances that every solver has to face."""
