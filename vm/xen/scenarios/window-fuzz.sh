# title: random operations of grant windows from both sides
# set: name
# machine: xen-pvh
# limit: 2400
# grants: bad

. /vm/xen/window.sh

# The hour of a release: FUZZ_SECONDS=3600.
FUZZ_SECONDS=${FUZZ_SECONDS:-240}

plan 10
before=$(free_memory)
check 'a guest is created' window_guest one 'type="pvh"' || give_up 'without guests there is nothing to see'
check 'another is created' window_guest two 'type="pvh"' || give_up 'without guests there is nothing to see'
A=$(domain one) B=$(domain two)
a fuzz $B $A >/dev/null
b fuzz $A $B >/dev/null
sleep $FUZZ_SECONDS
one=$(a fuzzed stop) two=$(b fuzzed stop)
like 'the first makes calls' "$one" 'calls [1-9]* accepted [1-9]*'
like 'the second makes calls' "$two" 'calls [1-9]* accepted [1-9]*'
note "first: $one; second: $two"
dump_windows
check 'the first is destroyed' xl destroy one
check 'it leaves no zombie' wait_for 60 is_not_there $A
check 'the second is destroyed' xl destroy two
check 'it leaves no zombie' wait_for 60 is_not_there $B
is 'no window is left' "$(dump_windows | grep -c ' window 0x')" 0
is 'the memory is free again' "$(free_memory)" "$before"
