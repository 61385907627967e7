"""Parts of the fake compiler."""
