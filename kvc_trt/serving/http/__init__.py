"""The light server: OpenAI's API over engines in one process, with an asyncio loop beside their schedulers."""
