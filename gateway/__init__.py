"""The gateway: OpenAI's HTTP interface and text on one side, token ids over gRPC on the other. Needs neither torch nor model weights."""
