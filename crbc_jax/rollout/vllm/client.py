"""One vLLM server's HTTP API: token ids in, token ids out, and new weights."""

import asyncio
import pathlib
from typing import Any

import httpx
import numpy as np

from crbc_jax.rollout.engine import Completion, Request

MODEL = "policy"  # The name that it is served under.


class BadAnswer(ConnectionError):
    """The server answered with an error, or with something that is no answer."""


class OtherServer(ConnectionError):
    """The server is not the process that took the weights: it was restarted."""


class Client:
    """Calls one server; every call has a time limit.

    Args:
        url: as http://127.0.0.1:8000.
        token: that the server asks for; "" if none.
        timeout: seconds that a call may take.
    """

    def __init__(self, url: str, *, token: str, timeout: float):
        self.url = url
        self._timeout = timeout
        self._instance = ""  # Of the server process that has the weights.
        headers = {"Authorization": f"Bearer {token}"} if token else {}
        self._http = httpx.AsyncClient(
            base_url=url,
            headers=headers,
            timeout=timeout,
            limits=httpx.Limits(max_connections=None),
        )

    async def close(self) -> None:
        await self._http.aclose()

    async def is_healthy(self) -> bool:
        """Whether the server answers, within a few seconds."""
        try:
            answer = await self._http.get("/health", timeout=5.0)
        except httpx.HTTPError:
            return False
        return answer.status_code == 200

    async def complete(self, request: Request, version: int) -> Completion:
        """Samples one reply.

        Raises:
            ConnectionError, TimeoutError: if none came.
            OtherServer: if it came from a process that has not taken our weights.
        """
        sampling = request.sampling
        body = {
            "model": MODEL,
            "prompt": request.prompt_ids.tolist(),
            "max_tokens": sampling.max_tokens,
            "temperature": sampling.temperature,
            "seed": request.seed,
            "stop_token_ids": list(sampling.stop_ids),
            "ignore_eos": True,  # What ends a reply is in stop_token_ids.
            "logprobs": 0,
            "return_token_ids": True,
            "skip_special_tokens": False,
        }
        answer = await self._post("/v1/completions", json=body)
        try:
            choice = answer["choices"][0]
            token_ids = np.array(choice["token_ids"], np.int32)
            logprobs = np.array(choice["logprobs"]["token_logprobs"], np.float32)
            finish_reason = choice["finish_reason"]
        except (KeyError, IndexError, TypeError, ValueError) as error:
            raise BadAnswer(f"{self.url}: no completion in {str(answer)[:200]}") from (
                error
            )
        is_whole = 1 <= len(token_ids) == len(logprobs) <= sampling.max_tokens
        if not is_whole or finish_reason not in ("stop", "length"):
            raise BadAnswer(
                f"{self.url}: {len(token_ids)} tokens with {len(logprobs)} "
                f"log-probabilities, finish_reason={finish_reason!r}"
            )
        return Completion(
            token_ids=token_ids,
            # Rounding may lift the log-probability of a certain token above 0.
            logprobs=np.minimum(logprobs, 0.0),
            policy_version=version,
            finish_reason=finish_reason,
        )

    async def load(self, directory: pathlib.Path, version: int) -> None:
        """Lets the server answer by the weights in `directory` from now on.

        Raises:
            ConnectionError, TimeoutError: if it does not confirm that it does.
        """
        self._instance = ""
        await self._post("/pause", params={"mode": "wait"})
        try:
            body = {"method": "load_published", "args": [str(directory)]}
            await self._post("/collective_rpc", json=body)
            await self._post("/reset_prefix_cache")
        finally:
            await self._post("/resume")
        await self.confirm(version)

    async def confirm(self, version: int) -> None:
        """Marks the server process as the one that has the weights of `version`.

        It was started on them, or has loaded them.
        """
        self._instance = ""
        name = f"{version:06d}"
        await self._post("/update_weight_version", json={"new_version": name})
        answer = await self._request("GET", "/weight_info")
        if answer.json().get("weight_version") != name:
            raise BadAnswer(f"{self.url}: {answer.text[:200]} after version {name}")
        self._instance = answer.headers.get("x-instance", "")
        if not self._instance:
            raise BadAnswer(
                f"{self.url} is no server of third_party/vllm/crbc_vllm.py: its "
                "answers bear no x-instance"
            )

    async def _post(self, path: str, **options: Any) -> Any:
        answer = await self._request("POST", path, **options)
        try:
            return answer.json() if answer.content else None
        except ValueError as error:
            raise BadAnswer(f"{self.url}{path}: not JSON: {error}") from error

    async def _request(self, method: str, path: str, **options: Any) -> httpx.Response:
        try:
            # httpx limits each read and write alone; this limits all of the call.
            async with asyncio.timeout(self._timeout):
                answer = await self._http.request(method, path, **options)
        except httpx.TimeoutException as error:
            raise TimeoutError(f"{self.url}{path}: {error!r}") from error
        except httpx.HTTPError as error:
            raise ConnectionError(f"{self.url}{path}: {error!r}") from error
        if answer.status_code != 200:
            raise BadAnswer(
                f"{self.url}{path} answers {answer.status_code}: {answer.text[:300]}"
            )
        if self._instance and answer.headers.get("x-instance") != self._instance:
            raise OtherServer(f"{self.url} was restarted")
        return answer
