#!/bin/sh
# Train on a machine that you reach by SSH. Its GPU samples and learns; your agent, tasks and reward stay here.
#
#   sh integrations/art-server/deploy/rented.sh [--dry-run] HOST [OPTION OF art serve]... -- COMMAND
#   sh integrations/art-server/deploy/rented.sh ubuntu@203.0.113.7 --model Qwen/Qwen3-4B-Instruct-2507 --engine vllm -- python drive.py
#
# It copies this checkout (as committed, with your changes of tracked files) to ~/art-rented on HOST, installs it there, starts
# `art serve`, forwards a port of this machine to it, and runs COMMAND here, with the server's address in ART_URL. At the end,
# also after Ctrl-C, it stops the server and copies the run to runs/. The same line again resumes the run, as long as HOST
# keeps ~/art-rented; else it starts another, and the old copy is kept as runs/RUN.DATE. HOST needs Linux, and curl if it has
# no uv; nothing on it listens to the network. One run at a time. --dry-run prints what would be done.
#
# Environment: RUN, the run's name (rented); PORT, of the dashboard and ART_URL here (8000); SERVER_PORT, on HOST (8000).
set -eu

say() { printf '%s\n' "$*" >&2; }
usage() { sed -n '2,/^[^#]/s/^# \{0,1\}//p' "$0" >&2; exit 2; }
quoted() { for each; do printf " '%s'" "$(printf %s "$each" | sed "s/'/'\\\\''/g")"; done; }

dry=
[ "${1-}" != --dry-run ] || { dry=yes; shift; }
[ $# -ge 3 ] || usage
host=$1 options=
shift
while [ $# -gt 1 ] && [ "$1" != -- ]; do
  case $1 in --host* | --port* | --run-dir* | --token* | --ssl-*)
    say "drop $1: the server listens on $host alone; RUN, PORT and SERVER_PORT set the rest"
    exit 2 ;;
  esac
  options="$options$(quoted "$1")"
  shift
done
[ $# -gt 1 ] || usage
shift

run=${RUN:-rented} port=${PORT:-8000} server_port=${SERVER_PORT:-8000}
case $run in *[!A-Za-z0-9._-]* | [.-]*)
  say "RUN=$run: a run's name may have letters, digits, . _ and -"
  exit 2 ;;
esac
checkout=$(CDPATH='' cd "$(dirname "$0")/../../.." && pwd)
folder=$(mktemp -d /tmp/art-rented-XXXXXX)
forward="-o ExitOnForwardFailure=yes -o ServerAliveInterval=15 -L 127.0.0.1:$port:127.0.0.1:$server_port"
export ART_URL="http://127.0.0.1:$port"

# A terminal on HOST, because SkyPilot counts only terminals as connections. $forward is split into words on purpose.
# shellcheck disable=SC2086
connect() {
  if [ "$dry" ]; then say "ssh -M -f -tt $forward $host sleep"
  else ssh -M -S "$folder/ssh" -f -tt $forward "$host" 'exec sleep 2147483647' > "$folder/terminal"; fi
}
connected() { ssh -S "$folder/ssh" -O check "$host" 2> /dev/null; }
keep_connected() { while sleep 5 && [ -d "$folder" ]; do connected || connect || true; done; }
disconnect() {
  [ "$dry" ] || ssh -S "$folder/ssh" -O exit "$host" 2> /dev/null || true
  rm -rf "$folder"
}
# Runs $1 on HOST, over the one connection that was opened first.
there() {
  if [ "$dry" ]; then say "ssh $host <<'EOF'" "
$1
EOF"; else ssh -S "$folder/ssh" "$host" "$1"; fi
}

# "server" is true while the process with that number is the server of this run.
server="cd ~/art-rented
server() { pid=\$(cat runs/$run.pid 2> /dev/null) && grep -qsz '^runs/$run\$' \"/proc/\$pid/cmdline\"; }"
stop="$server
! server || kill -TERM \$pid
while server; do sleep 1; done
rm -f runs/$run.pid"

bring_home() {
  say "copying the run to runs/$run"
  if [ "$dry" ]; then
    say "ssh $host tar -C art-rented/runs -cf - $run $run.id $run.log | tar -C runs -xf -"
    return
  fi
  mkdir -p runs
  incoming=$(mktemp -d runs/incoming-XXXXXX)
  # The log comes last, so that it is missing if anything is.
  if there "tar -C art-rented/runs -cf - $run $run.id $run.log" | tar -C "$incoming" -xf - && [ -f "$incoming/$run.log" ]; then
    before=runs/$run.before
    if cmp -s "runs/$run.id" "$incoming/$run.id"; then rm -rf "$before"
    elif [ -e "runs/$run" ]; then
      before=runs/$run.$(date +%Y%m%d-%H%M%S)
      say "runs/$run is another run's: keeping it as $before"
    fi
    [ ! -e "runs/$run" ] || mv "runs/$run" "$before"
    mv "$incoming/$run" "$incoming/$run.id" "$incoming/$run.log" runs/
  else say "the copy failed: the run is still in ~/art-rented/runs/$run on $host"; fi
  rm -rf "$incoming"
}

finish() {
  status=$?
  set +e
  trap '' INT TERM HUP
  trap - EXIT
  [ -z "$keeper" ] || kill "$keeper" 2> /dev/null
  if [ "$phase" ]; then
    say "stopping the server"
    if there "$stop"; then
      trap 'say "the copy was interrupted: the run is still on $host"; disconnect; exit 130' INT TERM HUP
      [ "$phase" = starting ] || bring_home
    else say "$host can't be reached: its server may still be running"; fi
    say "the same line again continues the run while $host keeps its disk; it costs until you stop it at its provider"
  fi
  disconnect
  exit "$status"
}
phase='' keeper=''
trap finish EXIT
trap 'exit 130' INT TERM HUP

say "copying the checkout to $host"
connect
there 'mkdir -p art-rented/runs && { nvidia-smi -L 2> /dev/null || echo "no GPU: training on the CPU"; }'
there "$stop
rm -rf checkout && mkdir checkout"
if [ "$dry" ]; then say "git archive HEAD | ssh $host tar -C art-rented/checkout -xf -"
else
  commit=$(git -C "$checkout" stash create)
  git -C "$checkout" archive "${commit:-HEAD}" | there 'tar -C art-rented/checkout -xf -'
fi

say "installing it there"
case $options in *vllm*) vllm=yes ;; *) vllm= ;; esac
there "set -e
cd art-rented
PATH=\"\$HOME/.local/bin:\$PATH\"
command -v uv > /dev/null || curl -LsSf https://astral.sh/uv/install.sh | sh
[ -x env/bin/python ] || uv venv --quiet --python '>=3.11,<3.14' env
set -- -e 'checkout[train]' -e checkout/plugins/art-classic
for each in art-cli art-compare art-embedded art-vllm art-gateway art-server; do set -- \"\$@\" -e \"checkout/integrations/\$each\"; done
if nvidia-smi -L > /dev/null 2>&1; then set -- \"\$@\" unsloth; fi
uv pip install --quiet --python env/bin/python \"\$@\"
[ -z '$vllm' ] || env/bin/python -c 'from art_vllm.environment import find; find()' 2> /dev/null || env/bin/art doctor --install vllm"

say "starting the server"
phase=starting
there "$server
[ -d runs/$run ] && [ -f runs/$run.id ] || od -An -tx8 -N8 /dev/urandom > runs/$run.id
true > runs/$run.log
OMP_WAIT_POLICY=PASSIVE nohup setsid env/bin/art serve --port $server_port --run-dir runs/$run$options >> runs/$run.log 2>&1 < /dev/null &
echo \$! > runs/$run.pid
tail -n +1 -f runs/$run.log & trap \"kill \$!\" EXIT
answers() { env/bin/python - <<'PYTHON'
import json, urllib.request as it
answer = it.build_opener(it.ProxyHandler({})).open('http://127.0.0.1:$server_port/status')
assert json.load(answer)['run'] == '$run'
PYTHON
}
until answers 2> /dev/null; do sleep 1; server || exit 1; done" >&2
phase=running

say "running$(quoted "$@"), dashboard at $ART_URL"
if [ "$dry" ]; then exit 0; fi
keep_connected & keeper=$!
"$@"
