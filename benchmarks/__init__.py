"""Speed and memory beside others, same work, one run. Ratios are what counts: machines are shared and noisy."""
