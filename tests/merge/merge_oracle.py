"""The merge in slow f64, written straight from the formulas; what the fast one is held against."""

import numpy as np


def average(deltas, weights):
    total = sum(weights)
    return sum(w / total * np.asarray(d, dtype=np.float64) for d, w in zip(deltas, weights, strict=True))


def radial(deltas, weights):
    deltas = [np.asarray(delta, dtype=np.float64) for delta in deltas]
    total = sum(weights)
    norms = [np.linalg.norm(delta.reshape(-1)) for delta in deltas]
    radius = sum(w * n for w, n in zip(weights, norms, strict=True)) / total
    direction = sum(
        (w / total * d / n for w, d, n in zip(weights, deltas, norms, strict=True) if n > 0),
        start=np.zeros_like(deltas[0]),
    )
    length = np.linalg.norm(direction.reshape(-1))
    return average(deltas, weights) if length < 1e-6 else radius * direction / length


def isotropic(matrix):
    matrix = np.asarray(matrix, dtype=np.float64)
    u, s, vt = np.linalg.svd(matrix, full_matrices=False)
    kept = s > max(matrix.shape) * 2.0**-23 * s[0]
    return s.mean() * (u[:, kept] @ vt[kept])


def correct(delta, momentum):
    d, m = np.asarray(delta, dtype=np.float64), np.asarray(momentum, dtype=np.float64)
    d_norm, m_norm = np.linalg.norm(d.reshape(-1)), np.linalg.norm(m.reshape(-1))
    if d_norm < 1e-8 or m_norm < 1e-8:
        return d
    cosine = float((d * m).sum() / (d_norm * m_norm))
    if cosine >= 0.2:
        return d
    confidence = d_norm / (d_norm + 3 * m_norm + 1e-8)
    if cosine < 0:
        beta = min(0.5 * -cosine * confidence, 0.5)
        return d + beta * -cosine * (d_norm / m_norm) * m
    turn = min((1 - cosine) * confidence, 1)
    turned = (1 - turn) * d / d_norm + turn * m / m_norm
    return turned * d_norm / np.linalg.norm(turned.reshape(-1))


def nesterov(params, momentum, gradient, lr, mu):
    gradient = np.asarray(gradient, dtype=np.float64)
    buffer = mu * np.asarray(momentum, dtype=np.float64) + gradient
    return np.asarray(params, dtype=np.float64) - lr * (gradient + mu * buffer), buffer


def merge(deltas, weights, correct_flags, layout, momentum, mu):
    """Merge whole fragments of learner deltas d (not negated); returns the outer gradient."""
    gradient = np.zeros(layout.numel)
    start = 0
    for spec in layout.tensors:
        stop = start + spec.numel
        parts = []
        for delta, flag in zip(deltas, correct_flags, strict=True):
            part = -np.asarray(delta, dtype=np.float64)[start:stop]
            parts.append(correct(part, (1 - mu) * np.asarray(momentum)[start:stop]) if flag else part)
        if layout.mode.name == "RDA":
            merged = radial(parts, weights)
        else:
            merged = average(parts, weights)
            if layout.mode.name == "ISO" and len(spec.shape) == 2:
                merged = isotropic(merged.reshape(spec.shape)).reshape(-1)
        gradient[start:stop] = merged
        start = stop
    return gradient
