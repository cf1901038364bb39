# Shared by scripts/* and .ci/run. Source it with `root` set to the root directory.
# shellcheck shell=bash

say() { printf '%s\n' "$*" >&2; }
has() { command -v "$1" >/dev/null 2>&1; }

# Programs that the machine has take precedence over those that the scripts install into .tools.
PATH="$PATH:${root:?}/.tools/bin"

# Makes sure that `cargo` runs. If HOME is not the one that Rust was installed for, rustup's cargo does not
# find its toolchain; then use the toolchain next to that cargo.
find_cargo() {
  local cargo home complaint
  if ! cargo="$(command -v cargo)"; then
    say "cargo is not on PATH; install Rust with rustup, or add the directory of cargo to PATH"
    return 1
  fi
  complaint="$(cargo --version 2>&1 >/dev/null)" && return 0
  home="$(dirname -- "$(dirname -- "$cargo")")"
  if [ -z "${RUSTUP_HOME:-}" ] && [ -d "$home/../.rustup/toolchains" ]; then
    RUSTUP_HOME="$(CDPATH='' cd -- "$home/../.rustup" && pwd)"
    export RUSTUP_HOME
    if [ -z "${CARGO_HOME:-}" ] && [ -w "$home" ]; then export CARGO_HOME="$home"; fi
    if cargo --version >/dev/null 2>&1; then
      say "no Rust toolchain under HOME; using RUSTUP_HOME=$RUSTUP_HOME${CARGO_HOME:+ CARGO_HOME=$CARGO_HOME}"
      return 0
    fi
  fi
  say "$complaint"
  say "$cargo does not run; set RUSTUP_HOME and CARGO_HOME to the directories of the Rust installation (often ~/.rustup and ~/.cargo of the user who installed it), or install Rust with rustup for this HOME"
  return 1
}
