"""How a rank asks its reward sources: functions here, coroutines, functions in worker processes, reward models."""
