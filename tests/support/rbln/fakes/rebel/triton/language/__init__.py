"""Names in the annotations of kernels."""

constexpr = int
