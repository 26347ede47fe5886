"""Speed and memory compared with other libraries, in one run each: ratios matter, since machines are noisy."""
