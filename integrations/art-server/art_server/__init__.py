"""Server, workers and dashboard: the policy and its trainer in one place, agents anywhere. Knows nothing about learning."""
