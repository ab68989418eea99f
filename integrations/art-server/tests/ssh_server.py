"""A real SSH server in a separate process, which runs commands in a temporary home. SIGUSR1 drops its connections."""

import asyncio
import os
import signal
import sys
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import asyncssh


class RentedMachine:
    """What a test knows of the machine: its home, and how to lose it."""

    def __init__(self, home, process):
        self.home, self._process = home, process

    def drop_connections(self):
        """What a laptop that falls asleep does to them."""
        self._process.send_signal(signal.SIGUSR1)


@asynccontextmanager
async def rented_machine(folder):
    """Yield the machine, which ``ssh`` in ``folder/bin`` knows as "rented"."""
    (folder / "home").mkdir()
    command(folder / "bin" / "ssh", f'exec /usr/bin/ssh -F {folder}/config "$@"')
    process = await asyncio.create_subprocess_exec(
        sys.executable, __file__, str(folder), stdout=asyncio.subprocess.PIPE
    )
    try:
        assert await process.stdout.readline() == b"listening\n"
        yield RentedMachine(folder / "home", process)
    finally:
        process.kill()
        await process.communicate()
        for file in folder.glob("home/art-rented/runs/*.pid"):  # of servers that a failed test leaves behind
            with suppress(ProcessLookupError):
                os.kill(int(file.read_text()), signal.SIGTERM)


def command(file, script):
    """Write a shell script that can be run by its name."""
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(f"#!/bin/sh\n{script}\n")
    file.chmod(0o755)


connections = set()


class Server(asyncssh.SSHServer):
    def connection_made(self, connection):
        connections.add(connection)

    def connection_requested(self, *_):
        return True  # ports are forwarded


async def run(process, home):
    env = os.environ | {"HOME": str(home), "PATH": f"{home}/.local/bin:{os.environ['PATH']}"}
    shell = await asyncio.create_subprocess_exec(
        *("sh", "-c", process.command), cwd=home, env=env, start_new_session=True,
        stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE,
    )  # fmt: skip

    async def pass_on(source, sink):
        while data := await source.read(65536):
            sink.write(data)
            await sink.drain()

    async def feed():
        await pass_on(process.stdin, shell.stdin)
        shell.stdin.close()

    feeding = asyncio.create_task(feed())
    await asyncio.gather(pass_on(shell.stdout, process.stdout), pass_on(shell.stderr, process.stderr))
    process.exit(await shell.wait())
    feeding.cancel()


async def serve(folder):
    key = asyncssh.generate_private_key("ssh-ed25519")
    key.write_private_key(folder / "key")
    (folder / "key").chmod(0o600)
    key.write_public_key(folder / "key.pub")
    listener = await asyncssh.listen(
        "127.0.0.1", 0, server_factory=Server, server_host_keys=[asyncssh.generate_private_key("ssh-ed25519")],
        authorized_client_keys=str(folder / "key.pub"), encoding=None, line_editor=False,
        process_factory=lambda process: run(process, folder / "home"),
    )  # fmt: skip
    config = {
        "HostName": "127.0.0.1", "Port": listener.get_port(), "User": "me", "IdentityFile": folder / "key", "LogLevel": "ERROR",
        "IdentitiesOnly": "yes", "StrictHostKeyChecking": "no", "UserKnownHostsFile": "/dev/null",
    }  # fmt: skip
    (folder / "config").write_text("Host rented\n" + "".join(f"  {name} {value}\n" for name, value in config.items()))

    def drop():
        for connection in connections:
            connection.abort()
        connections.clear()

    asyncio.get_running_loop().add_signal_handler(signal.SIGUSR1, drop)
    print("listening", flush=True)
    await listener.wait_closed()


if __name__ == "__main__":
    asyncio.run(serve(Path(sys.argv[1])))
