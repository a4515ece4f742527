# Set-up that scripts/demo, scripts/test and scripts/bench share. Source it, then call set_up; it may be called
# any number of times and does nothing where nothing is missing.
# shellcheck shell=bash

ROOT=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
PYTHON=/usr/bin/python3 # the distribution's own: its bcc is built for it
PACKAGES=(python3 python3-venv python3-bpfcc gcc libc6-dev)

fail() {
	printf '%s: %s\n' "${0##*/}" "$1" >&2
	exit 1
}

say() { printf '%s\n' "$1" >&2; }

# Install what is missing of the named distribution packages.
install_packages() {
	command -v dpkg-query >/dev/null || return 0 # not Debian or Ubuntu: check_programs says what is missing
	local missing=() package
	for package in "$@"; do
		[ "$(dpkg-query -W -f '${db:Status-Status}' "$package" 2>/dev/null)" = installed ] || missing+=("$package")
	done
	[ ${#missing[@]} -gt 0 ] || return 0
	[ "$(id -u)" -eq 0 ] || fail "missing packages, run as root or first: sudo apt-get install ${missing[*]}"
	say "installing ${missing[*]}"
	export DEBIAN_FRONTEND=noninteractive
	{ apt-get update -qq && apt-get install -y -qq --no-install-recommends "${missing[@]}"; } >&2 ||
		fail "apt-get could not install ${missing[*]}; its messages are above"
}

# Where packages are not ours to install, name what the distribution has to provide.
check_programs() {
	[ -x "$PYTHON" ] || fail "no $PYTHON; install the distribution's python3 (3.10 or newer)"
	"$PYTHON" -c 'import sys; sys.exit(sys.version_info < (3, 10))' || fail "$PYTHON is older than 3.10"
	"$PYTHON" -c 'import bcc' 2>/dev/null ||
		fail "$PYTHON cannot import bcc; install the distribution's package (python3-bpfcc on Debian and Ubuntu, python3-bcc on Fedora)"
	command -v cc >/dev/null || fail "no C compiler; install gcc and the C library's headers"
}

# Make .venv from the distribution's python and install the project into it, editable.
make_venv() {
	local venv=$ROOT/.venv wanted
	wanted="$ROOT $("$PYTHON" -c 'import sys; print(sys.version)') $(cksum <"$ROOT/pyproject.toml")"
	[ "$(cat "$venv/set-up" 2>/dev/null)" != "$wanted" ] || return 0
	say "making .venv"
	"$PYTHON" -m venv --clear --system-site-packages "$venv" >&2 || fail "could not make $venv; its messages are above"
	# By its variable: as an option, pip 22.0 (Ubuntu 22.04) refuses it.
	PIP_ROOT_USER_ACTION=ignore "$venv/bin/python" -m pip install --quiet --disable-pip-version-check --editable "$ROOT[dev]" >&2 ||
		fail "pip could not install the dependencies of pyproject.toml; its messages are above"
	printf '%s' "$wanted" >"$venv/set-up"
}

# Tracepoints are looked up in tracefs, which a container or a minimal system may not have mounted.
mount_tracefs() {
	[ ! -d /sys/kernel/tracing/events ] && [ ! -d /sys/kernel/debug/tracing/events ] || return 0
	[ -d /sys/kernel/tracing ] && [ "$(id -u)" -eq 0 ] || return 0 # gputail says itself what it misses
	mount -t tracefs tracefs /sys/kernel/tracing 2>/dev/null || say "could not mount tracefs; see .venv/bin/gputail check"
}

set_up() {
	# One set-up at a time: demo and test may be started together.
	exec 9<"$ROOT/scripts/lib.sh"
	flock 9
	install_packages "${PACKAGES[@]}" "$@"
	check_programs
	make_venv
	mount_tracefs
	exec 9<&-
}
