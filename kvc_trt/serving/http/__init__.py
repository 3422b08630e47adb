"""The light server: OpenAI's API for engines in one process, with an asyncio loop beside their schedulers."""
