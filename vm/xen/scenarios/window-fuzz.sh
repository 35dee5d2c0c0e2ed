# title: random operations of grant windows from both sides, beside a guest that has nothing to do with them
# group: window-long
# set: name
# machine: xen-pvh
# limit: 4200
# grants: bad
# driver: window-tests
# hypervisor: debug

. /vm/xen/window.sh

# The hour of a release: --set FUZZ_SECONDS=3600. The same SEED makes the same choices in each guest; what the two do to
# each other depends on the scheduler. OPERATIONS has a bit for each operation; 1 is the query alone, for control runs.
FUZZ_SECONDS=${FUZZ_SECONDS:-120}
SEED=${SEED:-$(($(date +%s) % 100000))}
OPERATIONS=${OPERATIONS:-63}
# Each guest stays on one processor: in a machine with two, guests ended by a triple fault, one of them before any window was
# there. An error of the emulator when a guest changes its processor is suspected.
PINNED=yes

bystander_content() {
    on three 'sha256sum </tmp/content' | tr -d '\r' | grep -o '^[0-9a-f]*'
}

# bystander_is_unharmed: succeeds if the bystander has its content, and its kernel logged no fault.
bystander_is_unharmed() {
    [ "$(bystander_content)" = "$content" ] && ! on three "dmesg | grep -E 'BUG|WARNING|Oops|Call Trace|general protection'"
}

# calls_had_effect ANSWER: succeeds if at least one call in twenty was no query and was accepted.
calls_had_effect() {
    echo "$1" | sed 's/[a-z:]//g' | awk '{ exit ($2 - $3) * 20 < $1 }'
}

# At this rate of exits QEMU's emulation of AMD's virtualisation loses a timer interrupt within minutes: it is pending in the
# APIC, and the processor is not told. Any other interrupt tells it again, so there is one each second.
agent_in_dom0
agent tick /run/ticks &
check 'the clock ticks' wait_for 10 test -s /run/ticks
before=$(free_memory)
check 'a guest is created' create_window_guest one 'type="pvh"' || give_up 'without guests there is nothing to see'
check 'another is created' create_window_guest two 'type="pvh"' || give_up 'without guests there is nothing to see'
check 'a bystander is created' create_guest three 'type="pvh"' || give_up 'without guests there is nothing to see'
check 'it takes commands' guest_ready three || give_up 'without guests there is nothing to see'
on three 'head -c 8388608 /dev/urandom >/tmp/content'
content=$(bystander_content)
granter_id=$(domain_id one) grantee_id=$(domain_id two)
note "seed $SEED"
granter fuzz $grantee_id $SEED $OPERATIONS >/dev/null
grantee fuzz $granter_id $((SEED + 1)) $OPERATIONS >/dev/null
# Each learns of the other's handles, as an honest peer does by the store.
start=$(date +%s) next=60
while [ $(($(date +%s) - start)) -lt $FUZZ_SECONDS ]; do
    sleep 2
    domain_exists $granter_id && domain_exists $grantee_id || { note "a guest is gone: $(xl list | tail -n +3 | tr '\n' ';')"; break; }
    one=$(granter fuzz-has) two=$(grantee fuzz-has)
    case $one/$two in
        *,*/*,*) ;;
        *) break ;;
    esac
    grantee fuzz-peer $one >/dev/null
    granter fuzz-peer $two >/dev/null
    [ $(($(date +%s) - start)) -lt $next ] || { note "after $next s, first: $(granter fuzzed); second: $(grantee fuzzed)"; next=$((next + 300)); }
done
check 'the bystander is unharmed while they go on' bystander_is_unharmed
one=$(granter fuzzed stop) two=$(grantee fuzzed stop)
matches 'the first made calls' "$one" 'calls [1-9]* accepted [1-9]*'
matches 'the second made calls' "$two" 'calls [1-9]* accepted [1-9]*'
check 'many calls of the first had an effect' calls_had_effect "$one"
check 'many calls of the second had an effect' calls_had_effect "$two"
note "$FUZZ_SECONDS s, first: $one; second: $two"
note "$(dump_windows | grep -E 'registered;' | tr '\n' ' ')"
check 'the first is destroyed' xl destroy one
check 'it leaves no zombie' wait_for 60 domain_is_gone $granter_id
check 'the second is destroyed' xl destroy two
check 'it leaves no zombie' wait_for 60 domain_is_gone $grantee_id
check 'the bystander is unharmed' bystander_is_unharmed
check 'no window is left' no_windows
xl destroy three
check 'all domains are gone' wait_for 30 only_dom0_is_left
is 'the memory is free again' "$(free_memory)" "$before"
complete_scenario
