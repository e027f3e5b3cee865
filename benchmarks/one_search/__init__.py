"""GRPO, LLDS and LLDS-MA from a policy that is stuck at one search. The plan is PLAN.md."""
