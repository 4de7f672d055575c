"""Draws inputs: seeded, on the device, with the distribution on record (zeros make matrix products faster)."""

from __future__ import annotations

from typing import Any, Dict, List


class Make:
    """Draws the inputs of one case. `drawn` records every draw as {"kind", "shape", ...} for the measurement's key."""

    def __init__(self, device: str, seed: int) -> None:
        import torch

        self.torch, self.device = torch, torch.device(device)
        self.generator = torch.Generator(device=self.device)
        self.generator.manual_seed(seed)
        self.drawn: List[Dict[str, Any]] = []

    def _dtype(self, name: str) -> Any:
        return getattr(self.torch, name)

    def normal(self, *shape: int, dtype: str = "float32", mean: float = 0.0, std: float = 1.0) -> Any:
        """Normal values; drawn in float32 and rounded to `dtype`."""
        self.drawn.append({"kind": "normal", "shape": list(shape), "dtype": dtype, "mean": mean, "std": std})
        x = self.torch.randn(*shape, generator=self.generator, device=self.device, dtype=self.torch.float32)
        return (x * std + mean).to(self._dtype(dtype))

    def uniform(self, *shape: int, dtype: str = "float32", low: float = 0.0, high: float = 1.0) -> Any:
        self.drawn.append({"kind": "uniform", "shape": list(shape), "dtype": dtype, "low": low, "high": high})
        x = self.torch.rand(*shape, generator=self.generator, device=self.device, dtype=self.torch.float32)
        return (x * (high - low) + low).to(self._dtype(dtype))

    def integers(self, *shape: int, low: int, high: int, dtype: str = "int32") -> Any:
        """Integers in [low, high)."""
        self.drawn.append({"kind": "integers", "shape": list(shape), "dtype": dtype, "low": low, "high": high})
        x = self.torch.randint(low, high, shape, generator=self.generator, device=self.device, dtype=self.torch.int64)
        return x.to(self._dtype(dtype))

    def zipf(self, *shape: int, rows: int, exponent: float = 1.1, dtype: str = "int64") -> Any:
        """Row indices with P(row r) proportional to (r+1)^-exponent, rows shuffled so that hot rows are spread."""
        self.drawn.append({"kind": "zipf", "shape": list(shape), "rows": rows, "exponent": exponent, "dtype": dtype})
        weight = self.torch.arange(1, rows + 1, device=self.device, dtype=self.torch.float64) ** -exponent
        count = 1
        for n in shape:
            count *= n
        picks = self.torch.multinomial(weight, count, replacement=True, generator=self.generator)
        order = self.torch.randperm(rows, generator=self.generator, device=self.device)
        return order[picks].reshape(shape).to(self._dtype(dtype))
