# Checks of an installed program, as a new user calls it; to be sourced before system.sh, which leaves its directory. `version` is the expected version.

# readme_example PROGRAM: runs the README's example of two guests, with the program under its usual name.
readme_example() {
    rm -rf /tmp/example && mkdir -p /tmp/example/bin && ln -s "$1" /tmp/example/bin/ringfence
    awk '/^<!-- runs: local/ { wanted = 1; next } wanted && /^```$/ { exit } wanted && !/^```/' "$readme" >/tmp/example/script
    [ -s /tmp/example/script ] && chown -R $user:$user /tmp/example
    as_user sh -c 'cd /tmp/example && PATH=/tmp/example/bin:$PATH timeout 60 sh -e script' | tee /tmp/example/output
    grep -q 'hello from web' /tmp/example/output
}

# completed WORD...: prints what bash completes the last of the words to.
completed() {
    bash -c 'source "$0" && COMP_WORDS=("$@") COMP_CWORD=$(($# - 1)) && COMPREPLY=() &&
        $(complete -p ringfence | sed "s/.*-F \([^ ]*\).*/\1/") ringfence "${COMP_WORDS[COMP_CWORD]}" "${COMP_WORDS[COMP_CWORD - 1]}" &&
        echo "${COMPREPLY[@]}"' "$completion" "$@"
}

# terminal COMMAND...: tmux with a terminal of 80 columns and 24 lines, as an ordinary user who wants no colours.
terminal() { as_user TERM=xterm-256color LANG=C.UTF-8 NO_COLOR=1 tmux -u -L checks -f /dev/null "$@"; }
in_terminal() { terminal new-session -d -x 80 -y 24 "$@"; }

# appears PATTERN: waits until the terminal shows the pattern.
appears() {
    for try in $(seq 100); do
        terminal capture-pane -p | grep -q -e "$1" && return
        sleep 0.1
    done
    terminal capture-pane -p
    return 1
}

# live_view PROGRAM: shows a guest by `top`, on no terminal and on one.
live_view() {
    local esc try
    esc=$(printf '\033')
    as_user "$1" run -q --name shown --uplink none -- sleep 600 >/tmp/shown 2>&1 &
    as_user "$1" wait shown || { cat /tmp/shown; return 1; }
    as_user "$1" top --interval 0.2 | tee /tmp/tables | grep -q shown || { cat /tmp/tables; return 1; }
    ! grep "$esc" /tmp/tables || return
    in_terminal "'$1' top --interval 0.2" && appears 'shown' || return
    terminal capture-pane -p
    # Bold and reverse are no colours.
    ! terminal capture-pane -p -e | grep "$esc\[\([0-9]*;\)*\([349][0-8]\|10[0-7]\)[;m]" || return
    terminal send-keys Enter && appears '^guest shown' || return
    terminal capture-pane -p
    terminal send-keys Escape q
    for try in $(seq 100); do
        terminal has-session 2>/dev/null || break
        sleep 0.1
    done
    ! terminal has-session 2>/dev/null || { echo 'top did not end by q'; terminal capture-pane -p; terminal kill-server; return 1; }
    as_user "$1" stop shown && wait
}

# zsh_completes FILE: lets zsh complete a command on a terminal.
zsh_completes() {
    in_terminal 'zsh -f' || return
    terminal send-keys "fpath=($(dirname "$1") \$fpath); autoload -Uz compinit && compinit -u -D && echo it is rea''dy" Enter
    appears '^it is ready' && terminal send-keys 'ringfence slir' Tab && appears 'ringfence slirp4netns'
    local status=$?
    terminal kill-server
    return $status
}

# timed NAME LABEL COMMAND...: checks that the command succeeds, and notes its time.
timed() {
    local begin end rest status name=$1 label=$2
    shift 2
    read -r begin rest </proc/uptime
    check "$name: $label" "$@"
    status=$?
    read -r end rest </proc/uptime
    note "$name: $label: $(awk "BEGIN { print $end - $begin }") s"
    return $status
}

# every_page DIRECTORY: formats each manual page, and fails on a warning.
every_page() {
    ls "$1"/man1/ringfence*.1* >/tmp/pages && [ "$(wc -l </tmp/pages)" -gt 20 ] || return
    while read -r page; do
        man --warnings --encoding=utf8 --local-file "$page" 2>/tmp/warnings >/tmp/page || return
        [ -s /tmp/page ] || { echo "$page is empty"; return 1; }
        # A long word leaves blanks in the line before it, which lintian accepts as well.
        ! grep -v -e 'cannot adjust line' -e 'cannot break line' -e "can't break line" /tmp/warnings || { echo "$page"; return 1; }
    done </tmp/pages
}

# use NAME PROGRAM: everything that needs no file but the program. `readme` is a file with the README.
use() {
    local begin end rest
    read -r begin rest </proc/uptime
    is "$1: it says its version" "$("$2" --version)" "ringfence $version"
    check "$1: an ordinary user runs a command" as_user "$2" run --uplink none -- true
    check "$1: a command has the host's network" as_user "$2" run -- ip addr
    check "$1: two guests of the README's example find each other" readme_example "$2"
    check "$1: two guests transfer by TCP" as_user "$2" demo
    rm -f /tmp/disk.img /tmp/data
    check "$1: a disk keeps what is written" as_user sh -c "
        head -c 65536 /dev/urandom >/tmp/data && truncate -s 8M /tmp/disk.img &&
        '$2' run --uplink none --disk /tmp/disk.img -- sh -c 'nbdcopy /tmp/data \"\$RINGFENCE_DISK0_URI\"' &&
        cmp -n 65536 /tmp/data /tmp/disk.img"
    check "$1: it says what the host allows" as_user "$2" doctor
    check "$1: it says so to programs" sh -c "'$2' doctor --json | python3 -m json.tool"
    check "$1: it shows that no guest runs" as_user "$2" top --interval 0.2
    check "$1: it shows a guest, in tables and on a terminal without colours" live_view "$2"
    check "$1: it shows them to programs" sh -c "'$2' top --interval 0.2 --json | python3 -m json.tool"
    read -r end rest </proc/uptime
    note "$1: used for $(awk "BEGIN { print $end - $begin }") s"
}

# files NAME SHARE: what lies beside the program. `zsh` and `fish` are the completions' places below SHARE.
files() {
    local completion=$2/bash-completion/completions/ringfence
    check "$1: each manual page is formatted without a warning" every_page "$2/man"
    is "$1: bash completes a command" "$(completed ringfence slir)" 'slirp4netns'
    is "$1: bash completes an option" "$(completed ringfence run --publish-d)" '--publish-default'
    check "$1: zsh completes a command" zsh_completes "$2/$zsh"
    is "$1: fish completes a command" "$(fish --no-config --command "source '$2/$fish'; complete --do-complete 'ringfence slir'" |
        cut -f 1)" 'slirp4netns'
}

# installed NAME: what a package installs.
installed() {
    use "$1" /usr/bin/ringfence
    files "$1" /usr/share
    check "$1: programs find it as passt" sh -c '/usr/libexec/ringfence/passt --version | grep Ringfence'
    check "$1: the manual has a page for a command" sh -c 'man --pager=cat ringfence-run | grep -i publish'
    check "$1: the configuration of the daemon is valid" ringfence serve --check
}

# upgrade NAME LABEL COMMAND...: upgrades the package while a guest runs, which must stay.
upgrade() {
    local name=$1
    shift
    as_user ringfence run -q --name kept --uplink none -- sleep 600 >/tmp/kept 2>&1 &
    check "$name: a guest starts before the upgrade" as_user sh -c '
        for try in $(seq 100); do ringfence exec kept -- true && exit; sleep 0.1; done; cat /tmp/kept; exit 1'
    echo '# changed' >>/etc/ringfence/ringfence.toml
    timed "$name" "$@"
    check "$name: the changed configuration was kept" grep -q '^# changed' /etc/ringfence/ringfence.toml
    check "$name: the new program reaches the guest" as_user ringfence exec kept -- true
    check "$name: the new program stops the guest" as_user ringfence stop kept
    wait
}
