"""What clients may send: one module an endpoint family. Whatever is not served is refused by name; nothing is ignored."""
