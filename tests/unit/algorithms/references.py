"""What the estimators and losses are compared with: the definitions, in plain NumPy loops, one token at a time.

Written from the papers' formulas and not from the code under test; slow on purpose. Imports nothing of miles.
"""

import math

import numpy as np

# -------------------------------------------------------------------- advantages


def gae(rewards, values, mask, gamma, lam, terminal_reward):
    """(advantages, returns) of one response, from the last token to the first, skipping observations."""
    advantages, returns = np.zeros(len(values)), np.zeros(len(values))
    next_value = next_advantage = 0.0
    last = True
    for t in range(len(values) - 1, -1, -1):
        if not mask[t]:
            continue
        reward = rewards[t] + (terminal_reward if last else 0.0)
        last = False
        next_advantage = reward + gamma * next_value - values[t] + gamma * lam * next_advantage
        advantages[t], returns[t] = next_advantage, next_advantage + values[t]
        next_value = values[t]
    return advantages, returns


def adaptive_lambda(length, alpha, min_length=1):
    if length == 0 or length < min_length:
        return 1.0
    return max(1.0 - 1.0 / (alpha * length), 0.0)


def reward_to_go(rewards, mask, gamma, terminal_reward):
    """Discounted rewards still to come at each trainable token."""
    places = [t for t in range(len(mask)) if mask[t]]
    out = np.zeros(len(mask))
    for i, t in enumerate(places):
        for j in range(i, len(places)):
            reward = rewards[places[j]] + (terminal_reward if j == len(places) - 1 else 0.0)
            out[t] += gamma ** (j - i) * reward
    return out


def whiten_rows(rows, masks, eps=1e-8):
    pooled = np.array([x for row, mask in zip(rows, masks, strict=True) for x, m in zip(row, mask, strict=True) if m])
    mean, var = pooled.mean(), pooled.var()
    return [
        np.where(np.array(m, bool), (r - mean) / math.sqrt(var + eps), 0.0) for r, m in zip(rows, masks, strict=True)
    ]


def outcome_advantages(kind, rewards, groups):
    """One advantage per trajectory; a loop over each trajectory's own group."""
    out = []
    for reward, group in zip(rewards, groups, strict=True):
        members = [r for r, g in zip(rewards, groups, strict=True) if g == group]
        n = len(members)
        if kind == "rloo":
            out.append(reward if n == 1 else reward - (sum(members) - reward) / (n - 1))
            continue
        if n == 1:
            out.append(0.0)
            continue
        centred = reward - np.mean(members)
        out.append(centred if kind == "dr_grpo" else centred / (np.std(members, ddof=1) + 1e-6))
    return out


# -------------------------------------------------------------------- policy losses, one token


def clipped(ratio, advantage, low, high, dual=None):
    loss = max(-ratio * advantage, -min(max(ratio, 1 - low), 1 + high) * advantage)
    if dual is not None and advantage < 0:
        loss = min(-dual * advantage, loss)
    return loss


def sequence_ratio(log_probs, old_log_probs, mask):
    differences = [p - o for p, o, m in zip(log_probs, old_log_probs, mask, strict=True) if m]
    return math.exp(sum(differences) / len(differences)) if differences else 1.0


def cispo(log_prob, old, advantage, low, high):
    return -min(max(math.exp(log_prob - old), 1 - low), 1 + high) * advantage * log_prob


def dis(log_prob, rollout, advantage, low, high):
    ratio = math.exp(min(max(log_prob - rollout, -20.0), 20.0))
    return -ratio * advantage * log_prob if 1 - low < ratio < 1 + high else 0.0


# -------------------------------------------------------------------- corrections


def correction_weights(old, rollout, masks, *, level, mode, low, high, reject=None, veto=None):
    """Weights of rows of tokens. `reject` is (level, low, high)."""

    def ratios(level, row_old, row_rollout, mask):
        logs = [min(max(o - b, -20.0), 20.0) for o, b in zip(row_old, row_rollout, strict=True)]
        active = [d for d, m in zip(logs, mask, strict=True) if m]
        if level == "token":
            return [math.exp(d) for d in logs]
        total = sum(active) / (len(active) if level == "geometric" else 1) if active else 0.0
        return [math.exp(min(max(total, -20.0), 20.0))] * len(logs)

    out = []
    for row_old, row_rollout, mask in zip(old, rollout, masks, strict=True):
        weights = []
        for ratio in ratios(level, row_old, row_rollout, mask):
            if mode is None:
                weights.append(1.0)
            elif mode == "truncate":
                weights.append(min(ratio, high))
            elif mode == "clip":
                weights.append(min(max(ratio, low), high))
            else:
                weights.append(ratio if low <= ratio <= high else 0.0)
        if reject is not None:
            kept = [reject[1] <= ratio <= reject[2] for ratio in ratios(reject[0], row_old, row_rollout, mask)]
            weights = [w if k else 0.0 for w, k in zip(weights, kept, strict=True)]
        if veto is not None and any(
            m and math.exp(o - b) < veto for o, b, m in zip(row_old, row_rollout, mask, strict=True)
        ):
            weights = [0.0] * len(weights)
        out.append([w if m else 0.0 for w, m in zip(weights, mask, strict=True)])
    return out


def opsm_kept(log_probs, old, advantages, masks, delta):
    out = []
    for row, row_old, row_advantages, mask in zip(log_probs, old, advantages, masks, strict=True):
        differences = [o - p for p, o, m in zip(row, row_old, mask, strict=True) if m]
        left = bool(differences) and sum(differences) / len(differences) > delta
        out.append([bool(m) and not (left and a < 0) for a, m in zip(row_advantages, mask, strict=True)])
    return out


# -------------------------------------------------------------------- KL, aggregation


def kl(kind, log_prob, ref, behaviour=None):
    d = min(max(log_prob - ref, -20.0), 20.0)
    k3 = math.exp(-d) - 1 + d
    return {
        "k1": d,
        "k2": d * d / 2,
        "k3": k3,
        "low_var_kl": min(max(k3, -10.0), 10.0),
        "unbiased": math.exp(log_prob - behaviour) * k3 if behaviour is not None else None,
    }[kind]


def aggregate(mode, losses, masks, constant=None):
    """The batch's loss from rows of token losses."""
    sums = [sum(x for x, m in zip(row, mask, strict=True) if m) for row, mask in zip(losses, masks, strict=True)]
    lengths = [sum(map(bool, mask)) for mask in masks]
    sequences = sum(n > 0 for n in lengths)
    if mode == "token-mean":
        return sum(sums) / sum(lengths)
    if mode == "seq-mean-token-mean":
        return sum(s / n for s, n in zip(sums, lengths, strict=True) if n) / sequences
    if mode == "seq-mean-token-sum":
        return sum(sums) / sequences
    return sum(sums) / sequences / constant


# -------------------------------------------------------------------- value losses, one token


def value_mse(value, target, old=None, clip=None):
    loss = (value - target) ** 2
    if old is None:
        return loss
    return max(loss, (min(max(value, old - clip), old + clip) - target) ** 2)


def two_hot(target, bins, low, high):
    position = (min(max(target, low), high) - low) / (high - low) * (bins - 1)
    below = math.floor(position)
    out = [0.0] * bins
    out[below] += 1 - (position - below)
    if position > below:
        out[below + 1] += position - below
    return out


def hl_gauss(target, bins, low, high, ratio):
    width = (high - low) / (bins - 1)
    mean, spread = min(max(target, low), high), ratio * width * math.sqrt(2)
    centres = [low + i * width for i in range(bins)]
    mass = [
        (math.erf((c + width / 2 - mean) / spread) - math.erf((c - width / 2 - mean) / spread)) / 2 for c in centres
    ]
    return [m / sum(mass) for m in mass]


def cross_entropy(logits, target):
    log_z = math.log(sum(math.exp(x) for x in logits))
    return -sum(p * (x - log_z) for p, x in zip(target, logits, strict=True))
