"""Transfers between processes by NIXL: the offer with which another process reads our memory, and reads of theirs.

NIXL registers addresses, so nothing here needs torch. The waiting coroutine drives it, because its own thread spins.
"""

from __future__ import annotations

import asyncio
import base64
import time
from typing import Annotated, Any, Protocol

from pydantic import Field

from kvc_trt.contexts.handoff import Bytes, Handoff
from kvc_trt.errors import HandoffRefused
from kvc_trt.proof.file import PromptDocument
from kvc_trt.validation import OwnSchema

LOOK_AGAIN_SECONDS = 0.002
FETCH_SECONDS = 10.0


class Offer(OwnSchema):
    """A prefill worker's offer of a context in its memory, as numbers and text alone: nothing in it can be executed."""

    version: Annotated[int, Field(ge=1, le=1)]
    handoff: Handoff
    tag: Annotated[str, Field(pattern=r"^[0-9a-f]{32}$")]
    address: Annotated[int, Field(ge=0, lt=1 << 64)]
    agent: Annotated[str, Field(pattern=r"^[A-Za-z0-9+/=]{4,16384}$")]
    """NIXL's metadata of the process that holds the context, in base64."""
    kv_proof: PromptDocument | None = None
    """The prompt's record for a proof, if the request asks for one."""


class Transfers(Protocol):
    """Transfers of bytes between the memory of processes."""

    @property
    def agent(self) -> str:
        """The metadata with which other processes read this memory, in base64."""

    def finished(self) -> list[str]:
        """Return the tags of the offers whose bytes other processes have read here since the last call."""

    async def fetch(self, offer: Offer, into: Bytes) -> None:
        """Read the bytes of an offer into `into` [nbytes], which is part of our own arena.

        Raises HandoffRefused if they cannot be read in time; nothing is written to `into` after that.
        """


class NixlTransfers:
    """Transfers over one arena [count, nbytes] in this process's memory."""

    def __init__(self, name: str, arena: Bytes) -> None:
        from nixl_cu12._api import nixl_agent, nixl_agent_config

        self._nixl = nixl_agent(name, nixl_agent_config(enable_prog_thread=False, backends=["UCX"]))
        self._nixl.register_memory([(arena.ctypes.data, arena.nbytes, 0, "")], "DRAM")
        self.agent = base64.b64encode(self._nixl.get_agent_metadata()).decode()
        """The metadata with which other processes read this memory, in base64."""

    def finished(self) -> list[str]:
        """Return the tags of the offers whose bytes other processes have read here since the last call."""
        messages = (message for found in self._nixl.get_new_notifs().values() for message in found)
        return [message.decode("ascii", "replace") for message in messages]

    async def fetch(self, offer: Offer, into: Bytes) -> None:
        """Read the bytes of an offer into `into` [nbytes]; HandoffRefused if that fails or takes too long."""
        size = offer.handoff.nbytes
        try:
            peer = self._nixl.add_remote_agent(base64.b64decode(offer.agent))
            own = self._nixl.get_xfer_descs([(into.ctypes.data, size, 0)], "DRAM")
            theirs = self._nixl.get_xfer_descs([(offer.address, size, 0)], "DRAM")
            transfer = self._nixl.initialize_xfer("READ", own, theirs, peer, offer.tag.encode())
            try:
                state, end = self._nixl.transfer(transfer), time.monotonic() + FETCH_SECONDS
                while state == "PROC" and time.monotonic() < end:
                    await asyncio.sleep(LOOK_AGAIN_SECONDS)
                    state = self._nixl.check_xfer_state(transfer)
            finally:
                await self._end(transfer)
        except Exception as error:  # NIXL's own: a peer that is gone, memory that it does not offer
            raise HandoffRefused(f"the handoff cannot be read ({type(error).__name__})") from None
        if state != "DONE":
            raise HandoffRefused(f"the handoff was not read within {FETCH_SECONDS:.0f} seconds")

    async def _end(self, transfer: Any) -> None:
        """Release a transfer, cancelling it if it still runs; it may write until NIXL has done so."""
        while True:
            try:
                return self._nixl.release_xfer_handle(transfer)  # type: ignore[no-any-return]
            except Exception:
                if self._nixl.check_xfer_state(transfer) != "PROC":
                    return None
            await asyncio.sleep(LOOK_AGAIN_SECONDS)
