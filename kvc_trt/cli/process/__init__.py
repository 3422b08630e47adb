"""The command as a process: how it ends in time, what its streams and its machine may lack."""
