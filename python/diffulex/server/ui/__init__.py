# SPDX-License-Identifier: Apache-2.0
"""The live denoising pages, for text and for images and videos: their files, and the routes that serve them.

A page is plain HTML, CSS and JavaScript that the browser loads as it is. It talks to the public
routes of the same server only, so it works behind a path prefix and under a policy that allows
nothing from elsewhere.
"""

from __future__ import annotations

import hashlib
import secrets
from importlib import resources
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from fastapi import FastAPI
    from starlette.requests import Request
    from starlette.responses import Response

__all__ = ["ASSET_TYPES", "IMAGES_PAGE", "mount_ui", "page_policy", "read_assets", "render_page"]

#: Media type per file ending; files with another ending are no part of the page. HTML beside the page
#: itself is the frame of a file to be made, not to be shown.
ASSET_TYPES = {
    ".css": "text/css; charset=utf-8",
    ".html": "text/plain; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
}
_PAGE = "index.html"
#: The page of a server of images or videos.
IMAGES_PAGE = "images.html"
#: Folder of the libraries from elsewhere; its versions.json says what they are.
_VENDOR = "vendor"
_NONCE_MARK = "{{nonce}}"
#: Beside the content policy: no sniffing, no framing, no address of the page sent anywhere.
_HEADERS = {
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",
}


def page_policy(nonce: str) -> str:
    """Content-Security-Policy of a page: its own files only, scripts and styles by nonce.

    Pictures and videos may be what its scripts have received.
    """
    return (
        f"default-src 'self'; script-src 'nonce-{nonce}'; style-src 'nonce-{nonce}'; "
        "img-src 'self' blob:; media-src blob:; "
        "object-src 'none'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    )


def render_page(template: str, nonce: str) -> str:
    """The page with the nonce of this answer in every script and style element."""
    return template.replace(_NONCE_MARK, nonce)


def read_assets() -> dict[str, tuple[str, bytes]]:
    """Media type and content of every file of the pages but the pages themselves, by path under /ui."""
    assets = {}
    here = resources.files(__name__)
    for prefix, folder in (("", here), (f"{_VENDOR}/", here.joinpath(_VENDOR))):
        for entry in folder.iterdir():
            media_type = ASSET_TYPES.get("." + entry.name.rpartition(".")[2])
            if media_type is not None and entry.name not in (_PAGE, IMAGES_PAGE):
                assets[prefix + entry.name] = (media_type, entry.read_bytes())
    return assets


def mount_ui(app: FastAPI, page_name: str = _PAGE) -> None:
    """Adds ``GET /ui``, ``GET /ui/<path>`` and ``GET /`` (which leads to the page) to an app.

    The routes need no key: the page holds no secret, and what it calls asks for one.
    """
    from starlette.exceptions import HTTPException  # noqa: PLC0415 (the extra `serve` brings it)
    from starlette.responses import RedirectResponse, Response  # noqa: PLC0415
    from starlette.routing import Route  # noqa: PLC0415

    template = resources.files(__name__).joinpath(page_name).read_text(encoding="utf-8")
    assets = read_assets()
    tags = {
        name: f'"{hashlib.sha256(content).hexdigest()[:16]}"'
        for name, (_, content) in assets.items()
    }

    async def page(_: Request) -> Response:
        nonce = secrets.token_urlsafe(18)
        return Response(
            render_page(template, nonce),
            media_type="text/html; charset=utf-8",
            headers={**_HEADERS, "Content-Security-Policy": page_policy(nonce)},
        )

    async def asset(request: Request) -> Response:
        name = request.path_params["name"]
        if name not in assets:
            raise HTTPException(404, f"/ui/{name}: expected a file of the page, got none")
        media_type, content = assets[name]
        headers = {**_HEADERS, "ETag": tags[name]}
        if request.headers.get("if-none-match") == tags[name]:
            return Response(status_code=304, headers=headers)
        return Response(content, media_type=media_type, headers=headers)

    async def root(request: Request) -> Response:
        return RedirectResponse(f"{request.scope.get('root_path', '')}/ui", status_code=307)

    # With a slash at its end, what the page refers to would be looked for one folder too deep.
    routes = (("/ui", page), ("/ui/", root), ("/ui/{name:path}", asset), ("/", root))
    for path, endpoint in routes:
        app.router.routes.append(Route(path, endpoint, include_in_schema=False))
