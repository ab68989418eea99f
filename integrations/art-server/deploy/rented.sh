#!/bin/sh
# Train on a machine that you reach by SSH. Its GPU samples and learns; your agent, tasks and reward stay here.
#
#   sh integrations/art-server/deploy/rented.sh [--dry-run] HOST [OPTION OF art serve]... -- COMMAND
#   sh integrations/art-server/deploy/rented.sh ubuntu@203.0.113.7 --model Qwen/Qwen3-4B-Instruct-2507 --engine vllm -- python drive.py
#
# It copies this checkout (as committed, with your changes of tracked files) to ~/art on HOST, installs it there, starts
# `art serve`, forwards a port of this machine to it, and runs COMMAND here, with the server's address in ART_URL. At the end,
# also after Ctrl-C, it stops the server and copies the run to runs/. The same line again resumes the run. HOST needs Linux,
# and curl if it has no uv; nothing on it listens to the network. --dry-run prints what would be done.
#
# Environment: RUN, the run's name (rented); PORT, of the dashboard and ART_URL here (8000); SERVER_PORT, on HOST (8000).
set -eu

usage() { sed -n '2,/^[^#]/s/^# \{0,1\}//p' "$0" >&2; exit 2; }
say() { printf '%s\n' "$*" >&2; }
quoted() { for each; do printf " '%s'" "$(printf %s "$each" | sed "s/'/'\\\\''/g")"; done; }

dry=
[ "${1-}" != --dry-run ] || { dry=yes; shift; }
[ $# -ge 3 ] || usage
host=$1 options=
shift
while [ $# -gt 1 ] && [ "$1" != -- ]; do options="$options$(quoted "$1")"; shift; done
[ $# -gt 1 ] || usage
shift

checkout=$(cd "$(dirname "$0")/../../.." && pwd)
run=${RUN:-rented} port=${PORT:-8000} server_port=${SERVER_PORT:-8000}
folder=$(mktemp -d /tmp/art-rented-XXXXXX)
forward="-o ExitOnForwardFailure=yes -o ServerAliveInterval=15 -L 127.0.0.1:$port:127.0.0.1:$server_port"
export ART_URL="http://127.0.0.1:$port"

# Runs $1 on HOST, over the one connection that was opened first.
there() { if [ "$dry" ]; then say "ssh $host <<'EOF'" "
$1
EOF"; else ssh -S "$folder/ssh" "$host" "$1"; fi; }
# $forward is split into words on purpose.
# shellcheck disable=SC2086
connect() { if [ "$dry" ]; then say "ssh -M -f -N $forward $host"; else ssh -M -S "$folder/ssh" -f -N $forward "$host"; fi; }
connected() { ssh -S "$folder/ssh" -O check "$host" 2>/dev/null; }
keep_connected() { while sleep 5; do connected || connect || true; done; }

# Stops the server, brings its run home and ends the connection.
finish() {
  status=$?
  trap '' INT TERM
  trap - EXIT
  [ -z "$keeper" ] || kill "$keeper"
  if [ "$served" ]; then
    say "stopping the server and copying its run to runs/$run"
    there "pid=\$(cat art/runs/$run.pid) && kill -TERM \$pid && while kill -0 \$pid 2>/dev/null; do sleep 1; done" ||
      say "the server had ended before; see runs/$run.log"
    if [ "$dry" ]; then say "ssh $host tar -C art/runs -czf - $run $run.log | tar -C runs -xzf -"
    else mkdir -p runs && there "tar -C art/runs -czf - $run $run.log" | tar -C runs -xzf -; fi
    say "the same line again continues the run; $host costs until you end it where you rent it"
  fi
  [ "$dry" ] || ssh -S "$folder/ssh" -O exit "$host" 2>/dev/null || true
  rm -rf "$folder"
  exit "$status"
}
served='' keeper=''
trap finish EXIT
trap 'exit 130' INT TERM

say "copying the checkout to $host"
connect
there 'mkdir -p art/runs && command -v nvidia-smi && nvidia-smi -L || echo "no GPU: training on the CPU"'
if [ "$dry" ]; then say "git archive HEAD | ssh $host tar -C art -xf -"
else
  commit=$(git -C "$checkout" stash create)
  git -C "$checkout" archive "${commit:-HEAD}" | there 'tar -C art -xf -'
fi

say "installing it there"
there 'set -e
PATH="$HOME/.local/bin:$PATH"
command -v uv >/dev/null || curl -LsSf https://astral.sh/uv/install.sh | sh
[ -x art-env/bin/python ] || uv venv --quiet --python ">=3.11,<3.14" art-env
set -- -e "art[train]" -e art/plugins/art-classic
for each in art-cli art-embedded art-vllm art-gateway art-server; do set -- "$@" -e "art/integrations/$each"; done
if command -v nvidia-smi >/dev/null; then set -- "$@" unsloth; fi
uv pip install --quiet --python art-env/bin/python "$@"
if command -v nvidia-smi >/dev/null; then art-env/bin/art doctor --install vllm; fi'

say "starting the server"
served=yes
there "cd art
kill -0 \$(cat runs/$run.pid 2>/dev/null) 2>/dev/null || {
  OMP_WAIT_POLICY=PASSIVE nohup setsid ../art-env/bin/art serve --port $server_port --run-dir runs/$run$options \\
    > runs/$run.log 2>&1 < /dev/null &
  echo \$! > runs/$run.pid
}
tail -n +1 -f runs/$run.log & trap \"kill \$!\" EXIT
until ../art-env/bin/python -c 'from urllib.request import urlopen; urlopen(\"http://127.0.0.1:$server_port/status\")' 2>/dev/null
do kill -0 \$(cat runs/$run.pid) || exit 1; sleep 1; done" >&2

say "running$(quoted "$@"), dashboard at $ART_URL"
if [ "$dry" ]; then exit 0; fi
keep_connected & keeper=$!
"$@"
