# Sourced by the scripts beside it: `ensure_venv EXTRA` makes .venv if it is missing and installs this checkout
# with that extra (test or dev) if what it is built from has changed since the last time.

ensure_venv() {
    local extra="$1" python stamp isolation
    if [ ! -x .venv/bin/python ]; then
        # The CPU build that constraints.txt pins is looked for under 3.11 first.
        for python in "${PYTHON:-}" python3.11 python3.12 python3.13; do
            [ -n "$python" ] && command -v "$python" >/dev/null 2>&1 && "$python" -c '' 2>/dev/null && break
            python=""
        done
        [ -n "$python" ] || { echo "no python3.11, python3.12 or python3.13 here: install one, or name it in PYTHON" >&2; exit 3; }
        echo "making .venv with $python" >&2
        "$python" -m venv .venv || { echo "could not make .venv: $python needs its venv module" >&2; exit 3; }
    fi
    stamp="$(cat pyproject.toml constraints.txt requirements.hashed.txt hatch_build.py swift/swift_ft/state/kernels.cpp swift/swift_ft/log/ring.cpp | sha256sum)"
    # What dev installs holds what test installs.
    for have in .venv/.installed-dev ".venv/.installed-$extra"; do
        [ "$(cat "$have" 2>/dev/null)" = "$stamp" ] && return
    done
    echo "installing swift-ft with [$extra] into .venv" >&2
    # First all that has a hash (there are those of wheels for Linux), what builds swift-ft included; then torch, whose wheels differ between indexes, by its
    # version; then this checkout, with what is there.
    if [ "$(uname -s)" = Linux ]; then
        .venv/bin/python -m pip install --quiet --require-hashes --no-deps -r requirements.hashed.txt >&2 ||
            { echo "pip could not install what requirements.hashed.txt names: see its message above" >&2; exit 3; }
        isolation=--no-build-isolation
    fi
    {
        .venv/bin/python -m pip install --quiet -c constraints.txt torch &&
            .venv/bin/python -m pip install --quiet ${isolation:-} -c constraints.txt -e ".[$extra]"
    } >&2 || { echo "pip could not install swift-ft: see its message above" >&2; exit 3; }
    echo "$stamp" >".venv/.installed-$extra"
}
