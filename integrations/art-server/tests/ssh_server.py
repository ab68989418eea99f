"""A real SSH server on this machine, that runs what it is told in a folder of its own."""

import asyncio
import os
from contextlib import asynccontextmanager

import asyncssh


class RentedMachine:
    """What a test knows of the machine: its home, and the connections to it."""

    def __init__(self, home):
        self.home, self.connections = home, []

    def drop_connections(self):
        """What a laptop that falls asleep does to them."""
        for connection in self.connections:
            connection.abort()
        self.connections.clear()

    def server(self):
        machine = self

        class Server(asyncssh.SSHServer):
            def connection_made(self, connection):
                machine.connections.append(connection)

            def connection_requested(self, *_):
                return True  # ports are forwarded

        return Server()

    async def run(self, process):
        env = os.environ | {"HOME": str(self.home), "PATH": f"{self.home}/.local/bin:{os.environ['PATH']}"}
        shell = await asyncio.create_subprocess_exec(
            *("sh", "-c", process.command), cwd=self.home, env=env, start_new_session=True,
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


@asynccontextmanager
async def rented_machine(folder):
    """Yield the machine, which ``ssh`` in ``folder/bin`` knows as "rented"."""
    machine = RentedMachine(folder / "home")
    machine.home.mkdir()
    key = asyncssh.generate_private_key("ssh-ed25519")
    key.write_private_key(folder / "key")
    (folder / "key").chmod(0o600)
    key.write_public_key(folder / "key.pub")
    listener = await asyncssh.listen(
        "127.0.0.1", 0, server_factory=machine.server, server_host_keys=[asyncssh.generate_private_key("ssh-ed25519")],
        authorized_client_keys=str(folder / "key.pub"), process_factory=machine.run, encoding=None,
    )  # fmt: skip
    config = {
        "HostName": "127.0.0.1", "Port": listener.get_port(), "User": "me", "IdentityFile": folder / "key", "LogLevel": "ERROR",
        "IdentitiesOnly": "yes", "StrictHostKeyChecking": "no", "UserKnownHostsFile": "/dev/null",
    }  # fmt: skip
    (folder / "config").write_text("Host rented\n" + "".join(f"  {name} {value}\n" for name, value in config.items()))
    (folder / "bin").mkdir()
    command(folder / "bin" / "ssh", f'exec /usr/bin/ssh -F {folder}/config "$@"')
    async with listener:
        yield machine


def command(file, script):
    """Write a shell script that can be run by its name."""
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(f"#!/bin/sh\n{script}\n")
    file.chmod(0o755)
