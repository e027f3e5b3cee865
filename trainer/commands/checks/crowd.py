"""How long a function of the user's keeps all trajectories of a step waiting, by the time of one call."""

from __future__ import annotations

from dataclasses import dataclass

from trainer.config.schema import Config


@dataclass(frozen=True)
class Crowd:
    """Those who may call it at the same time."""

    trajectories: int
    concurrency: int
    """Calls of the function at a time."""

    @classmethod
    def of(cls, config: Config, concurrency: int) -> Crowd:
        """The trajectories of a step."""
        return cls(config.rollout.prompts_per_step * config.rollout.group_size, concurrency)

    def waits(self, seconds: float) -> float:
        """Seconds until the last one has its result. seconds: of one call."""
        return seconds * self.trajectories / self.concurrency

    def remedy(self, section: str) -> str:
        return f"{section}.concurrency ({self.concurrency} now) lets as many calls run at a time"

    def note(self, section: str, seconds: float, limit: float) -> str:
        """Of a search that lets them wait too long; "" of others. section: of the retriever; seconds: of one
        call; limit: of one search."""
        longest = self.waits(seconds)
        if longest <= limit:
            return ""
        return (
            f"a call took {seconds:.2g} s: {self.trajectories} trajectories that search at once wait up to "
            f"{longest:.0f} s, and a search is given up after {limit:g} s; {self.remedy(section)}"
        )
