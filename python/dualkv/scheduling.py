"""dualkv.schedule: which rank computes which responses, in which micro-batches."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass

from . import _abi
from ._library import Handle, library
from ._tensors import group_lengths, integer, length_vector, number, require_bool


@dataclass(frozen=True)
class CostModel:
    """Cost of a micro-batch, in any unit: a sum over its rows, its targets and its visible pairs.

    The default counts rows. `from_dimensions` counts a model's floating-point operations.

    Attributes:
        token: cost of a row (token) in all layers.
        pair: cost of a visible pair, see `SegmentForest.visible_pairs`.
        target: cost of a response token's logits, on top of its row.

    Raises:
        ValueError: a cost is not 0 to 1e250.
    """

    token: float = 1.0
    pair: float = 0.0
    target: float = 0.0

    def __post_init__(self) -> None:
        for name in ("token", "pair", "target"):
            if not 0 <= number(getattr(self, name), name) <= 1e250:
                raise ValueError(f"{name} must be 0 to 1e250, got {getattr(self, name)}")

    @classmethod
    def from_dimensions(
        cls,
        *,
        hidden: int,
        layers: int,
        heads: int,
        kv_heads: int,
        head_dim: int,
        intermediate: int,
        vocab: int,
        backward: bool = True,
    ) -> CostModel:
        """FLOPs of a decoder with gated MLPs.

        Args:
            hidden: width of the residual stream.
            layers: number of layers.
            heads, kv_heads, head_dim: of attention.
            intermediate: width of the MLP; of a mixture of experts, that of all experts a token goes to.
            vocab: size of the vocabulary; 0 if logits are not computed.
            backward: whether the backward pass is counted too: twice the forward, and 2.5 times for pairs,
                whose scores it computes again.

        Raises:
            ValueError: a dimension is below 1, the vocabulary below 0, or `kv_heads` does not divide `heads`.
            TypeError: one is not an integer, or `backward` not a bool.
        """
        dimensions = dict(
            hidden=hidden,
            layers=layers,
            heads=heads,
            kv_heads=kv_heads,
            head_dim=head_dim,
            intermediate=intermediate,
            vocab=vocab,
        )
        for name, value in dimensions.items():
            integer(value, name, least=0 if name == "vocab" else 1)
        if heads % kv_heads != 0:
            raise ValueError(f"kv_heads must divide heads, got kv_heads {kv_heads} and heads {heads}")
        require_bool(backward, "backward")
        projections = hidden * head_dim * (2 * heads + 2 * kv_heads)
        token = 2.0 * layers * (projections + 3 * hidden * intermediate)
        pair = 4.0 * layers * heads * head_dim
        target = 2.0 * hidden * vocab
        products, pairs = (3.0, 3.5) if backward else (1.0, 1.0)
        return cls(token=products * token, pair=pairs * pair, target=products * target)

    def cost(self, prompt_length: int, response_lengths) -> float:
        """Cost of a prompt with some of its responses.

        Raises:
            ValueError: a length is negative.
            TypeError: a length is not an integer.
        """
        prompt = integer(prompt_length, "prompt_length", least=0)
        lengths = length_vector(response_lengths, "response_lengths").tolist()
        targets, pairs = sum(lengths), prompt * (prompt + 1) / 2
        for length in lengths:
            pairs += length * (prompt + (length + 1) / 2)
        return self.token * (prompt + targets) + self.target * targets + self.pair * pairs


@dataclass(frozen=True)
class MicroBatch:
    """Part of a step: for each of its groups, some of the group's responses.

    Attributes:
        parts: (group, [responses]) in the order of the groups: indices into the lists that `schedule` was
            given.
        num_tokens: rows of the packed batch.
        cost: by the schedule's cost model.
    """

    parts: list[tuple[int, list[int]]]
    num_tokens: int
    cost: float

    @property
    def is_filler(self) -> bool:
        """Whether it only makes up the number of micro-batches: a prompt alone, so that its loss is 0."""
        return not any(responses for _, responses in self.parts)

    def take_groups(self, values) -> list:
        """The entries of its groups: of values[g].

        Raises:
            ValueError: `values` has no entry for one of them.
        """
        return [_entry(values, "values", group, "group") for group, _ in self.parts]

    def take_responses(self, values) -> list[list]:
        """The entries of its responses, group by group: of values[g][n].

        Raises:
            ValueError: `values` has no entry for one of them.
        """
        groups = zip(self.parts, self.take_groups(values))
        return [
            [_entry(entries, f"values[{group}]", n, "response") for n in responses]
            for (group, responses), entries in groups
        ]


def _entry(values, name: str, index: int, kind: str):
    try:
        return values[index]
    except IndexError:
        raise ValueError(
            f"{name} must have an entry for each {kind}, among them {kind} {index}, got {len(values)}"
        ) from None
    except TypeError:
        raise TypeError(
            f"{name} must be a list with an entry for each {kind}, got {type(values).__name__}"
        ) from None


@dataclass(frozen=True)
class Schedule:
    """What each rank does in a step.

    Attributes:
        ranks: ranks[r], the micro-batches of rank r, the most expensive first. Each rank has as many.
    """

    ranks: list[list[MicroBatch]]

    @property
    def num_tokens(self) -> int:
        """Rows of all micro-batches."""
        return sum(micro_batch.num_tokens for rank in self.ranks for micro_batch in rank)

    @property
    def rank_costs(self) -> list[float]:
        """Cost of each rank's micro-batches."""
        return [sum(micro_batch.cost for micro_batch in rank) for rank in self.ranks]

    @property
    def imbalance(self) -> float:
        """Cost of the slowest rank over the mean cost: 1.0 is even."""
        costs = self.rank_costs
        return max(costs) * len(costs) / sum(costs) if sum(costs) > 0 else 1.0


def schedule(
    prompt_lengths,
    response_lengths,
    *,
    num_ranks: int,
    max_tokens: int,
    cost_model: CostModel | None = None,
    equal_samples: bool = False,
) -> Schedule:
    """Spreads the responses of groups over ranks and micro-batches, each exactly once.

    Groups stay whole, except where `max_tokens` forces a cut, or where the slowest rank gains more by it than
    the repeated prompt costs it. Every rank has the same number of micro-batches; no group is cut for that.
    The same input gives the same schedule, so each rank may make it for itself.

        for micro_batch in dualkv.schedule(...).ranks[rank]:
            batch = dualkv.pack(micro_batch.take_groups(prompts), micro_batch.take_responses(responses))
            advantages_here = micro_batch.take_responses(advantages)

    A rank that has too few micro-batches, even with one for each group, has fillers: the shortest prompt,
    without responses. Packed like any other micro-batch, it has no targets; its loss is 0 and so are all
    gradients. Without any response there are no micro-batches.

    Args:
        prompt_lengths: tokens of each group's prompt, [G].
        response_lengths: tokens of each group's responses, [[R00, R01, ...], [R10, ...], ...]. Groups and
            responses may be empty.
        num_ranks: ranks that share the step.
        max_tokens: largest number of rows in a micro-batch, prompts counted once each; never exceeded.
        cost_model: what makes a rank slow; None counts rows.
        equal_samples: whether every rank gets the same number of responses. If that does not divide, they
            differ by one.

    Raises:
        ValueError: a response does not fit into `max_tokens` with its prompt, a number is out of range, or
            the number of groups differs.
        TypeError: a length is not an integer, or `equal_samples` not a bool.
    """
    require_bool(equal_samples, "equal_samples")
    prompts, counts, flat = group_lengths(prompt_lengths, response_lengths)
    cost_model = CostModel() if cost_model is None else cost_model
    if not isinstance(cost_model, CostModel):
        raise TypeError(f"cost_model must be a dualkv.CostModel, got {type(cost_model).__name__}")
    params = _abi.dualkv_step_schedule_params(
        num_groups=len(prompts),
        prompt_lengths=prompts.data_ptr(),
        response_counts=counts.data_ptr(),
        response_lengths=flat.data_ptr(),
        num_ranks=integer(num_ranks, "num_ranks"),
        max_tokens=integer(max_tokens, "max_tokens"),
        token_cost=number(cost_model.token, "cost_model.token"),
        target_cost=number(cost_model.target, "cost_model.target"),
        pair_cost=number(cost_model.pair, "cost_model.pair"),
        equal_samples=equal_samples,
    )
    made = Handle(
        library.dualkv_step_schedule_create, library.dualkv_step_schedule_destroy, ctypes.byref(params)
    )
    view = _abi.dualkv_step_schedule_view()
    library.dualkv_step_schedule_get_view(made, ctypes.byref(view))
    entries = view.num_ranks * view.num_micro_batches
    part_begin = _copy(view.part_begin, entries + 1)
    groups = _copy(view.groups, view.num_parts)
    response_begin = _copy(view.response_begin, view.num_parts + 1)
    responses = _copy(view.responses, view.num_responses)
    parts = [
        (group, responses[begin:end]) for group, begin, end in zip(groups, response_begin, response_begin[1:])
    ]
    micro_batches = [
        MicroBatch(parts[begin:end], tokens, cost)
        for begin, end, tokens, cost in zip(
            part_begin,
            part_begin[1:],
            _copy(view.tokens, entries),
            _copy(view.costs, entries, ctypes.c_double),
        )
    ]
    count = view.num_micro_batches
    return Schedule([micro_batches[r * count : (r + 1) * count] for r in range(view.num_ranks)])


def _copy(address: int | None, count: int, kind=ctypes.c_int64) -> list:
    """The values at an address of the C library."""
    return list((kind * count).from_address(address)) if count > 0 else []
