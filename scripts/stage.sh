# Starts a nats-server and a bridge with the demo agent, for scripts that call the bridge. Source it with `root` set to
# the root directory, then call `start_stage`, or `start_nats` and `start_bridge FILE`. Everything ends with the script.
# shellcheck shell=bash

# shellcheck source=scripts/common.sh
. "${root:?}/scripts/common.sh"

# `background` lists further processes that the script started.
work="" broker="" bridge="" background=""

# Ends a process that this script started, and waits for its exit.
end() {
  local pid="$1" tries=0
  kill -TERM "$pid" 2>/dev/null || return 0
  while kill -0 "$pid" 2>/dev/null && [ "$tries" -lt 200 ]; do
    sleep 0.1
    tries=$((tries + 1))
  done
  kill -KILL "$pid" 2>/dev/null || true
  wait "$pid" 2>/dev/null || true
}

clean_up() {
  local status=$? pid
  trap - EXIT
  trap '' INT TERM HUP
  for pid in $background; do end "$pid"; done
  [ -z "$bridge" ] || end "$bridge"
  [ -z "$broker" ] || end "$broker"
  [ -z "$work" ] || rm -rf "$work"
  exit "$status"
}
trap clean_up EXIT
trap 'exit 130' INT
trap 'exit 143' TERM HUP

fail() {
  say "$0: $*"
  if [ -n "$work" ] && [ -s "$work/bridge.log" ]; then
    say "last lines of the bridge's log:"
    tail -n 20 "$work/bridge.log" >&2
  fi
  exit 1
}

# until_true SECONDS COMMAND..: repeats the command until it succeeds.
until_true() {
  local end=$((SECONDS + $1))
  shift
  until "$@" >/dev/null 2>&1; do
    [ "$SECONDS" -lt "$end" ] || return 1
    sleep 0.1
  done
}

# Prints a free port.
free_port() {
  local port
  for _ in 1 2 3 4 5 6 7 8 9 10 11 12 13 14 15 16 17 18 19 20; do
    # Outgoing connections use ports from 32768 on.
    port=$((10000 + RANDOM % 22000))
    if ! (exec 3<>"/dev/tcp/127.0.0.1/$port") 2>/dev/null; then
      printf '%s\n' "$port"
      return 0
    fi
  done
  return 1
}

# Builds the bridge, starts nats-server, and exports NATS_URL and PATH.
start_nats() {
  # The caller's shell may have these set for another NATS server or bridge.
  unset NATS_CREDS NATS_NKEY NATS_TOKEN NATS_USER NATS_PASSWORD NATS_CA NATS_CERT NATS_KEY
  unset A2A_BRIDGE_CONFIG A2A_BRIDGE_PREFIX A2A_BRIDGE_LOG A2A_BRIDGE_LOG_FORMAT

  find_cargo || exit 1
  NATS_SERVER_BIN="$("$root/scripts/nats-server")" || exit 1
  cd "$root"
  say "building (the first time takes a few minutes)"
  cargo build --locked || fail "the build failed"
  target="$(cargo metadata --locked --no-deps --format-version 1 | sed 's/.*"target_directory":"\([^"]*\)".*/\1/')"
  A2A_BRIDGE_BIN="$target/debug/a2a-bridge"
  PATH="$target/debug:$PATH"
  export A2A_BRIDGE_BIN PATH

  work="$(mktemp -d)"
  # Process groups of their own: Ctrl-C reaches this script first, which then stops everything in order.
  set -m
  "$NATS_SERVER_BIN" -js -a 127.0.0.1 -p -1 --ports_file_dir "$work" -sd "$work/jetstream" >"$work/nats.log" 2>&1 </dev/null &
  broker=$!
  set +m
  if ! until_true 10 test -s "$work/nats-server_$broker.ports"; then
    cat "$work/nats.log" >&2
    fail "nats-server did not start"
  fi
  NATS_URL="$(grep -o 'nats://[^"]*' "$work/nats-server_$broker.ports" | head -n 1)"
  export NATS_URL
}

# start_bridge FILE: starts the bridge with this configuration.
start_bridge() {
  set -m
  a2a-bridge run --config "$1" >"$work/bridge.log" 2>&1 </dev/null &
  bridge=$!
  set +m
}

# Starts everything and waits for the demo agent; exports NATS_URL, DEMO_PORT and PATH.
start_stage() {
  start_nats
  DEMO_PORT="$(free_port)" || fail "no free port"
  export DEMO_PORT
  start_bridge config/demo.yaml
  until_true 30 is_ready || fail "the demo agent did not become ready within 30 s"
}

is_ready() { a2a-bridge agents --json | grep -q '"state": "ready"'; }
