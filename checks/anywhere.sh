#!/usr/bin/env bash
# Run `uv run nox` as a newcomer would, on machines that differ: for maintainers, before a release.
#
#     checks/anywhere.sh                 # all conditions, about ten minutes each
#     checks/anywhere.sh quiet busy      # some of them
#
# Each condition gets a fresh clone of HEAD with its own environments, which is removed if it passes.
# The last lines are a table; the exit status is the number of conditions that failed.
set -uo pipefail
root=$(git -C "$(dirname "${BASH_SOURCE[0]}")" rev-parse --show-toplevel)
conditions=(quiet busy isa-default isa-avx2 threads-1 threads-2 torch-cuda torch-cpu empty-caches space)
(($# > 0)) && conditions=("$@")
work=$(mktemp -d)
# A folder of wheels with a CPU build of torch.
wheels=${UV_FIND_LINKS:-}
results=()
loops=()

end_loops() {
    for pid in "${loops[@]}"; do kill "$pid" 2>/dev/null; done
    loops=()
}
trap 'end_loops; echo "left: $work"' INT TERM

for condition in "${conditions[@]}"; do
    folder=$work/$condition
    settings=()
    case $condition in
        quiet) ;;
        busy)
            for _ in 1 2 3 4 5; do
                while :; do :; done &
                loops+=($!)
            done
            ;;
        isa-*) settings=(ATEN_CPU_CAPABILITY="${condition#isa-}") ;;
        threads-*) settings=(OMP_NUM_THREADS="${condition#threads-}") ;;
        torch-cuda) settings=(UV_FIND_LINKS=) ;;
        torch-cpu)
            if [[ -z $wheels ]]; then
                results+=("$condition not run: UV_FIND_LINKS names no folder with a CPU build of torch")
                continue
            fi
            ;;
        empty-caches)
            settings=(UV_CACHE_DIR="$work/cache/uv" XDG_CACHE_HOME="$work/cache" HF_HOME="$work/cache/hf")
            ;;
        space) folder="$work/a folder with spaces" ;;
        *)
            echo "unknown condition $condition; known: quiet busy isa-default isa-avx2 threads-1" \
                "threads-2 torch-cuda torch-cpu empty-caches space" >&2
            exit 64
            ;;
    esac
    git clone --quiet "$root" "$folder" || exit 1
    start=$SECONDS
    # The environments first: only the run itself is timed.
    (cd "$folder" && env "${settings[@]}" uv run nox -s lint </dev/null >"$work/$condition.log" 2>&1)
    made=$SECONDS
    (cd "$folder" && env "${settings[@]}" uv run nox </dev/null >>"$work/$condition.log" 2>&1)
    status=$?
    end_loops
    results+=("$condition status $status, environment $((made - start)) s, run $((SECONDS - made)) s")
    echo "${results[-1]}"
    sed -n '/^session  /,$p' "$work/$condition.log"
    if ((status == 0)); then rm -rf "$folder"; else echo "see $work/$condition.log and $folder"; fi
done

echo
printf '%s\n' "${results[@]}"
failed=0
for line in "${results[@]}"; do [[ $line == *"status 0,"* ]] || ((failed += 1)); done
((failed > 0)) || rm -rf "$work"
exit "$failed"
