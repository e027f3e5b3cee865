"""The collapse study: arms x seeds of the laboratory, outcomes, statistics and tables (PLAN.md)."""
