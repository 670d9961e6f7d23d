"""SGLang engines: launching a server, talking to it, and the stand-ins that let it run on a CPU."""
