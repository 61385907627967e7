"""The seam between the three services: the schema, its generated stubs, and what both ends of a connection must agree on."""
