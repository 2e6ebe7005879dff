"""From a loop to the layer in five steps. Each is a class that computes the same, with one change.
measure_steps.py prints what each keeps for the backward and how long it takes. Why each change
helps: docs/compile.md.

T tokens, H hidden size, E experts, K experts per token, N = T·K rows, M rows of one expert, F FFN
size of an expert (W where F is torch.nn.functional). Capitals at the end of a name are the tensor's
axes.
"""
import sys
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import small                                                                  # noqa: E402


class Loop(nn.Module):
    """1. A loop over the experts, each with its tokens.

    How many tokens an expert has is known only at run time: for each expert the host reads it, also
    in a graph. With fullgraph=True the compiler makes one graph of the loop, with code for each
    expert by itself. Without fullgraph=True the graph breaks at `torch.where`.
    """

    def __init__(self, hidden_size: int, ffn_hidden_size: int, num_experts: int, topk: int):
        super().__init__()
        H, W, E = hidden_size, ffn_hidden_size, num_experts
        self.topk = topk
        self.router = nn.Parameter(0.02 * torch.randn(E, H))
        self.fc1 = nn.Parameter(0.02 * torch.randn(E, 2, W, H))                # gate and up
        self.fc2 = nn.Parameter(0.02 * torch.randn(E, H, W))

    def forward(self, x_TH: Tensor) -> Tensor:
        probs_TK, indices_TK = self.route(x_TH)
        y_TH = torch.zeros_like(x_TH)
        for e in range(len(self.fc1)):
            token_M, k_M = torch.where(indices_TK == e)
            hidden = F.linear(x_TH[token_M], self.fc1[e].flatten(0, 1))
            rows_MH = F.linear(self.swiglu(hidden), self.fc2[e])
            y_TH.index_add_(0, token_M, (rows_MH * probs_TK[token_M, k_M, None]).to(x_TH.dtype))
        return y_TH

    def route(self, x_TH):
        chosen_TK, indices_TK = self.logits(x_TH).topk(self.topk)
        return chosen_TK.softmax(-1), indices_TK

    def logits(self, x_TH):
        return x_TH.float() @ self.router.float().t()

    def swiglu(self, hidden, prob=1.0):
        gate, up = hidden.float().chunk(2, -1)
        return (F.silu(gate) * up * prob).to(hidden.dtype)


class Sorted(Loop):
    """2. The rows of an expert lie side by side, so one grouped product takes all experts.

    Every shape is known, so it is one graph. This is what one writes first: some twenty lines.
    Compiled it keeps the gathered rows, the outputs of both products and the activation.
    """

    def forward(self, x_TH: Tensor) -> Tensor:
        probs_TK, indices_TK = self.route(x_TH)
        order_N, offsets_E = self.sort(indices_TK)
        token_N = order_N // self.topk
        hidden = F.grouped_mm(x_TH[token_N], self.fc1.flatten(1, 2).mT, offs=offsets_E)
        rows_NH = F.grouped_mm(self.swiglu(hidden), self.fc2.mT, offs=offsets_E)
        rows_NH = (rows_NH * probs_TK.flatten()[order_N, None]).to(x_TH.dtype)
        return torch.zeros_like(x_TH).index_add(0, token_N, rows_NH)

    def sort(self, indices_TK):
        """(order [N]: row -> assignment t·K + k, offsets [E]: where the rows of an expert end)."""
        ids_N, experts_E = indices_TK.flatten(), torch.arange(len(self.fc1), device=self.fc1.device)
        offsets_E = (ids_N[:, None] == experts_E).sum(0).cumsum(0).int()
        return ids_N.argsort(stable=True), offsets_E


def again(function, *args):
    """function(*args), computed once more in the backward: only the arguments are kept."""
    return checkpoint(function, *args, use_reentrant=False, preserve_rng_state=False)


class Checkpoints(Sorted):
    """3. The prob goes in front of fc2, and two checkpoints say what to keep: x and fc1's output.

    A prob behind fc2 needs fc2's output for its gradient; in front of it the activation is enough,
    and that is made again. The compiler repeats no product for it: it keeps what a product needs
    and computes the rest in the kernels that read it.
    """

    def forward(self, x_TH: Tensor) -> Tensor:
        chosen_TK, indices_TK = again(self.logits, x_TH).topk(self.topk)
        order_N, offsets_E = self.sort(indices_TK)
        prob_N1 = chosen_TK.softmax(-1).flatten()[order_N, None]
        hidden = again(self.up, x_TH, order_N, offsets_E)                      # [N, 2F]
        rows_NH = again(self.down, hidden, prob_N1, offsets_E)
        # The rows of each token, added in their order
        inverse_TK = order_N.argsort().view_as(indices_TK)           # assignment -> row
        return sum(rows_NH[row_T].float() for row_T in inverse_TK.unbind(1)).to(x_TH.dtype)

    def up(self, x_TH, order_N, offsets_E):
        rows_NH = x_TH[order_N // self.topk]
        return F.grouped_mm(rows_NH, self.fc1.flatten(1, 2).mT, offs=offsets_E)

    def down(self, hidden, prob_N1, offsets_E):
        act_NF = self.swiglu(hidden, prob_N1)
        return F.grouped_mm(act_NF, self.fc2.mT, offs=offsets_E)


class Gather(torch.autograd.Function):
    """there(x, *places), whose gradient is back(gradient, *places)."""

    @staticmethod
    def forward(ctx, x, there, back, *places):
        ctx.back = back
        ctx.save_for_backward(*places)
        return there(x, *places)

    @staticmethod
    def backward(ctx, grad):
        return ctx.back(grad, *ctx.saved_tensors), None, None, None, None


class Linear(torch.autograd.Function):
    """rows · weight[e]ᵀ for the rows of expert e."""

    @staticmethod
    def forward(ctx, rows, weight, offsets_E):
        ctx.save_for_backward(rows, weight, offsets_E)
        return F.grouped_mm(rows, weight.mT, offs=offsets_E)

    @staticmethod
    def backward(ctx, grad):
        rows, weight, offsets_E = ctx.saved_tensors
        grad_rows = F.grouped_mm(grad, weight, offs=offsets_E)
        return grad_rows, F.grouped_mm(grad.t(), rows, offs=offsets_E), None


def spread(x_TH, order_N, inverse_TK):
    """Each token, once for each of its assignments: [N, H]."""
    return x_TH[order_N // inverse_TK.shape[1]]


def collect(rows_NH, order_N, inverse_TK):
    """The rows of each token, added in their order."""
    return sum(rows_NH[row_T].float() for row_T in inverse_TK.unbind(1)).to(rows_NH.dtype)


class Gathers(Checkpoints):
    """4. Autograd's gradient of x[token] adds rows to tokens with atomics, in another order in each
    run. But which rows a token has is known, so it is a gather too, and the other way round.

    A weight's gradient by autograd would be transposed, as the weight in F.grouped_mm, and copied.
    """

    def forward(self, x_TH: Tensor) -> Tensor:
        chosen_TK, indices_TK = again(self.logits, x_TH).topk(self.topk)
        order_N, offsets_E = self.sort(indices_TK)
        inverse_TK = order_N.argsort().view_as(indices_TK)           # assignment -> row
        places = order_N, inverse_TK
        hidden = again(self.up, x_TH, offsets_E, *places)                      # [N, 2F]
        prob_N1 = chosen_TK.softmax(-1).flatten()[order_N, None]
        rows_NH = again(self.down, hidden, prob_N1, offsets_E)
        return Gather.apply(rows_NH, collect, spread, *places)

    def up(self, x_TH, offsets_E, *places):
        rows_NH = Gather.apply(x_TH, spread, collect, *places)
        return Linear.apply(rows_NH, self.fc1.flatten(1, 2), offsets_E)

    def down(self, hidden, prob_N1, offsets_E):
        return Linear.apply(self.swiglu(hidden, prob_N1), self.fc2, offsets_E)


# 5. small.py: the same experts, and what is needed to run them anywhere. Its with_gradient is
# Gather, its GroupedLinear is Linear. Its router's product copies nothing to fp32, and its masks
# of unrouted rows let the compiler make the gradients of gate and up in one kernel.
STEPS = {"1 loop, eager": Loop, "2 sorted rows": Sorted, "3 two checkpoints": Checkpoints,
         "4 gathers both ways": Gathers, "5 small.py": small.MoE}
