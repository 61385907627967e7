"""The scheduler: owns every KV block and every batch, decides with integers only, and never imports torch."""
