"""Static shapes: geometry, decode buckets, their planner, and the histogram of batch sizes."""
