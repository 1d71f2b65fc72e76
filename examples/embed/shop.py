"""A FastAPI application with the store inside: `uvicorn shop:app`, then open the page."""

from contextlib import asynccontextmanager

import httpx
from fastapi import FastAPI
from fastapi.responses import FileResponse

from topics_server.app import create_app, lifespan, ready

events = create_app()
store = httpx.AsyncClient(transport=httpx.ASGITransport(app=events), base_url="http://localhost")


@asynccontextmanager
async def living(_app: FastAPI):
    async with lifespan(events):
        await ready(events)
        await store.put("/v0/topics/orders")
        yield


app = FastAPI(lifespan=living)
app.mount("/events", events)


@app.post("/orders/{number}")
async def order(number: int) -> dict:
    answer = await store.post("/v0/topics/orders", json={"records": [{"data": {"order": number}}]})
    return answer.raise_for_status().json()


@app.get("/")
def page() -> FileResponse:
    return FileResponse("page.html")
