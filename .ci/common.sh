# Shared by .ci/run, .ci/nightly, .ci/aot and .ci/dropin. Sourced, with bash, from the repository's root.

failures=()
LIMIT_REACHED=124 # the exit status of what `limited` ended; `timeout` has the same

# refuse TEXT...: what is wrong with the arguments or the machine, in one line, before anything runs.
refuse() {
    printf 'error: %s\n' "$*" >&2
    exit 2
}

# help_wanted [ARGUMENT...]: prints the comment at the head of the script and ends, where that is asked for.
help_wanted() {
    if [[ ${1:-} == -h || ${1:-} == --help ]]; then
        sed -n '1d; /^#/!q; s/^# \{0,1\}//p' "${BASH_SOURCE[1]}"
        exit 0
    fi
}

# begin: makes the folder $work, which also takes temporary files and goes at the end. Ctrl-C, SIGTERM and SIGHUP end
# all that `step` and `background` have started.
begin() {
    work=$(mktemp -d)
    mkdir "$work/tmp"
    export TMPDIR=$work/tmp
    # Tests start hundreds of processes, each of which would compile jax's modules anew.
    unset PYTHONDONTWRITEBYTECODE
    trap 'rm -rf "$work"' EXIT
    trap 'stopped INT 130' INT
    trap 'stopped TERM 143' TERM
    trap 'stopped HUP 129' HUP
}

stopped() {
    local group groups
    trap '' INT TERM HUP
    printf '\n!!! stopped by SIG%s\n' "$1" >&2
    mapfile -t groups < <(jobs -p)
    for group in "${groups[@]}"; do kill -TERM -- "-$group" 2>/dev/null || true; done
    wait
    # What a step started may outlive it, as long as `limited` lets it.
    for group in "${groups[@]}"; do
        while kill -0 -- "-$group" 2>/dev/null; do sleep 0.1; done
    done
    exit "$2"
}

# background COMMAND...: starts a command in a process group of its own, which one signal reaches.
background() {
    # Not `&` alone: without job control the command and all that it starts would ignore SIGINT, which tests send.
    set -m
    (
        set +m
        "$@"
    ) </dev/null &
    set +m
}

# limited SECONDS COMMAND...: runs a command and ends it after SECONDS, which should be at least four times of what it
# takes on two idle cores: a busy machine is no fault. Says so when it was the limit that ended it. For commands of a
# `step`: `timeout` and the command are a process group of their own, to which SIGTERM is passed on.
limited() {
    local limit=$1 start=$SECONDS status=0 group
    shift
    background exec timeout --kill-after=60 "$limit" "$@"
    group=$!
    trap 'kill -TERM "$group"; wait "$group"; exit 143' TERM
    wait "$group" || status=$?
    trap - TERM
    if ((status != 0 && SECONDS - start >= limit)); then
        printf '!!! ended by the limit of %d s: %s\n' "$limit" "$*" >&2
        status=$LIMIT_REACHED
    fi
    return "$status"
}

# step NAME COMMAND...: runs the command in a subshell, says how long it took, remembers a failure and goes on.
step() {
    local name=$1 start=$SECONDS status
    shift
    printf '\n=== %s\n' "$name"
    # Not `"$@" || status=$?`: bash ignores `set -e` inside of a command whose status is tested.
    set +e
    background strict "$@"
    wait $!
    status=$?
    set -e
    if ((status == 0)); then
        printf '=== %s: ok (%d s)\n' "$name" $((SECONDS - start))
    elif ((status == LIMIT_REACHED)); then
        printf '=== %s: FAILED, ended by its limit of time (%d s)\n' "$name" $((SECONDS - start))
        failures+=("$name: ended by its limit of time")
    else
        printf '=== %s: FAILED with status %d (%d s)\n' "$name" "$status" $((SECONDS - start))
        failures+=("$name")
    fi
}

strict() {
    set -e
    "$@"
}

# checkout FOLDER: the files a fresh clone would have (untracked ones too, ignored ones not), so that nothing that lies
# around in the working tree helps a test to pass.
checkout() {
    git rev-parse --is-inside-work-tree >/dev/null 2>&1 || refuse "$PWD is no git checkout, whose files are to be tested"
    mkdir -p "$1"
    git ls-files -z --cached --others --exclude-standard | while IFS= read -r -d '' file; do
        if [[ -e $file ]]; then printf '%s\0' "$file"; fi
    done | tar --create --null --files-from=- | tar --extract --directory="$1"
}

# workers: how many test processes to start, one a core and 3 GB of memory; TACO_TEST_WORKERS says otherwise.
workers() {
    local cores memory
    if [[ -n ${TACO_TEST_WORKERS:-} && ! $TACO_TEST_WORKERS =~ ^[1-9][0-9]*$ ]]; then
        refuse "TACO_TEST_WORKERS=$TACO_TEST_WORKERS: must be a whole number of test processes, at least 1"
    fi
    cores=$(nproc)
    memory=$(awk '/^MemAvailable/ {print int($2 / 3e6)}' /proc/meminfo)
    printf '%d' "${TACO_TEST_WORKERS:-$((memory < cores ? (memory < 1 ? 1 : memory) : cores))}"
}

# test_command: the README's own, word for word.
test_command() {
    sed -n '/the test command that .ci\/run takes/,/^```$/p' README.md | sed '1,/^```bash$/d;/^```$/d'
}

# other_pythons: one interpreter per line, version and path, for each supported version that the machine has and that is
# not $1 (as 3.12).
other_pythons() {
    local candidate version seen=" $1 "
    for candidate in python3.11 python3.12 python3.13 "$HOME"/.pyenv/versions/*/bin/python; do
        candidate=$(command -v "$candidate") || continue
        # A shim may stand there for a version that is not active, and a distribution may lack venv: both fail here.
        version=$("$candidate" -c 'import ensurepip, sys, venv; print("%d.%d" % sys.version_info[:2])' 2>/dev/null) || continue
        case $version in 3.11 | 3.12 | 3.13) ;; *) continue ;; esac
        [[ $seen == *" $version "* ]] && continue
        seen+="$version "
        printf '%s %s\n' "$version" "$candidate"
    done
}

# finish LOG...: the closing words; exits with 1 if a step failed. LOG is pytest's output.
finish() {
    local log
    printf '\n'
    for log in "$@"; do
        grep -hsE '(passed|failed|error|no tests ran|deselected).* in [0-9.]+s' "$log" | tail -n 1 || true
    done
    if ((${#failures[@]})); then
        printf 'FAILED after %d s:' "$SECONDS"
        printf ' [%s]' "${failures[@]}"
        printf '\n'
        exit 1
    fi
    printf 'All passed after %d s\n' "$SECONDS"
}
