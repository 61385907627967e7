"""What Amazon SageMaker asks of a container beside ``/ping``: ``/invocations`` and ``/adapters``.

``routes`` has both. ``/invocations`` hands a request to the route whose body it has, and ``/adapters`` loads
and unloads LoRA adapters. The application imports this room; it imports routes and what is below them.
"""
