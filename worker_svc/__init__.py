"""The worker: runs one model on one device for a scheduler.

``__main__`` reads ``settings`` and runs ``service``, which joins the rooms. From the top down: ``api``
(gRPC), ``execution`` (plans), then ``pooling``, ``graphs``, ``vllm_adapter``, ``sampling``, ``grammars`` and
``model_files`` side by side, then ``devices``, then ``plans``. ``vllm_platform`` is the entry point that vLLM
calls. Only ``deploy`` imports this package; it imports ``protos``.
"""
