"""HTTP routes: one file an endpoint family, each route a few lines."""
