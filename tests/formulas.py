"""The literal formulas of the training objectives, written out in plain loops."""

from __future__ import annotations

import math

G, T, V = 5, 4, 11  # groups, drafts of each, vocabulary


class Loops:
    """The formulas, one number at a time. Slots of a group: indices of those with a label, and of the drafts."""

    def __init__(self, draft, verifier, labels, valid, heads, progress=1.0, level=None):
        self.q, self.p = draft.detach().softmax(-1).tolist(), verifier.softmax(-1).tolist()
        self.policy = heads["on_policy"].softmax(-1).tolist()
        self.x, self.heads, self.progress, self.level = labels.tolist(), heads, progress, level
        first = labels.shape[1] - T  # slots before the first draft
        self.step = [1 - first + k for k in range(labels.shape[1])]
        self.slots = [[k for k in range(labels.shape[1]) if valid[g, k]] for g in range(G)]
        self.drafts = [[k for k in ks if self.step[k] >= 1] for ks in self.slots]
        self.bias = {n: (heads[n] + draft.detach()).softmax(-1).tolist() for n in ("markov", "calibrator")}

    def qx(self, g, k):
        return self.q[g][k][self.x[g][k]]

    def hit(self, g, k):
        return max(self.q[g][k]) == self.qx(g, k)

    def decayed(self, each, gamma, slots=None):
        top = bottom = 0.0
        for g in range(G):
            for k in (slots or self.slots)[g]:
                w = math.exp(-(max(self.step[k], 1) - 1) / gamma)
                top, bottom = top + w * each(g, k), bottom + w
        return top / bottom

    def groups(self, each):
        some = [g for g in range(G) if self.drafts[g]]
        return sum(each(g) for g in some) / len(some)

    def kl(self, g, k, to=None):
        return sum(a * math.log(a / b) for a, b in zip((to or self.p)[g][k], self.q[g][k]))

    def rkl(self, g, k, to=None):
        return sum(b * math.log(b / a) for a, b in zip((to or self.p)[g][k], self.q[g][k]))

    def alpha(self, g, k):
        return sum(min(a, b) for a, b in zip(self.p[g][k], self.q[g][k]))

    def lk(self, g, k):
        lam = math.exp(-3 * self.alpha(g, k))
        return lam * self.kl(g, k) + (1 - lam) * 0.5 * sum(abs(a - b) for a, b in zip(self.p[g][k], self.q[g][k]))

    def bv(self, g):
        r, lowest, scores = 1.0, 1.0, []
        for k in self.drafts[g]:
            scores.append(sum(min(lowest * a, r * b) for a, b in zip(self.p[g][k], self.q[g][k])))
            r *= self.qx(g, k) / self.p[g][k][self.x[g][k]]
            lowest = min(lowest, r)
        beta = min(1.0, self.progress / 0.5)
        if beta == 0:
            return -sum(map(math.log, scores)) / len(scores)
        return -math.log(sum(s**beta for s in scores) / len(scores)) / beta

    def vat(self):
        total = 0.0
        for g in range(G):
            rejected = next((k for k in self.drafts[g] if not self.hit(g, k)), math.inf)
            for k in self.slots[g]:
                total -= (1.0 if k <= rejected else math.exp(-(k - rejected) / 7)) * math.log(self.qx(g, k))
        return total / sum(map(len, self.slots))

    def positional(self):
        top = bottom = 0.0
        for g in range(G):
            for k in self.slots[g]:
                w = (T - max(self.step[k], 1) + 1) / T
                top, bottom = top - w * math.log(self.qx(g, k)), bottom + w
        return top / bottom

    def focal(self, g):
        k = next((k for k in self.drafts[g] if not self.hit(g, k)), None)
        return 0.0 if k is None else -((1 - self.qx(g, k)) ** 2) * math.log(self.qx(g, k))

    def prefixes(self, g, each):
        ks = self.drafts[g]
        return sum(math.prod(each(g, i) for i in ks[: n + 1]) for n in range(len(ks))) / len(ks)

    def dpace(self):
        total = 0.0
        for ks, g in zip(self.slots, range(G)):
            smooth = [0.5 * self.qx(g, k) + 0.5 for k in ks]
            for j, k in enumerate(ks):
                total -= sum(math.prod(smooth[: m + 1]) for m in range(j, len(ks))) * math.log(self.qx(g, k))
        return total / sum(map(bool, self.slots))

    def nelbo(self):
        ce = [-sum(math.log(self.qx(g, k)) for k in self.slots[g]) for g in range(G)]
        return sum(c / t for c, t in zip(ce, self.level.tolist())) / sum(map(bool, self.slots))

    def corrected(self, name):
        hidden = [any(self.step[k] == 0 for k in ks) for ks in self.slots]
        slots = self.slots if name == "markov" else [d if h else [] for d, h in zip(self.drafts, hidden)]
        return self.decayed(lambda g, k: -math.log(self.bias[name][g][k][self.x[g][k]]), 7, slots)

    def confidence(self, target):
        total = n = 0.0
        for g in range(G):
            for k in self.drafts[g]:
                c = 1 / (1 + math.exp(-float(self.heads["confidence"][g, k])))
                t = float(self.hit(g, k)) if target == "hit" else self.alpha(g, k)
                total -= t * math.log(c) + (1 - t) * math.log(1 - c)
                n += 1
                if target == "hit" and not self.hit(g, k):
                    break
        return total / (n if target == "overlap" else sum(map(bool, self.drafts)))

    def length(self):
        total = 0.0
        for g in range(G):
            run = next((i for i, k in enumerate(self.drafts[g]) if not self.hit(g, k)), None)
            if run is None and len(self.drafts[g]) == T:
                run = T
            if run is not None:
                total -= math.log(float(self.heads["length"][g].softmax(-1)[run]))
        return total / sum(map(bool, self.drafts))
