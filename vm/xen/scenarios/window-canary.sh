# title: a spinning reader never sees what a page holds after its revoke (wants two processors)
# set: name
# machine: xen-pvh
# limit: 900
# driver: window-tests

. /vm/xen/window.sh

# On one processor the change of guests empties the TLB: only two show that the revoke does.
ROUNDS=${ROUNDS:-2000}

check 'a granter is created' window_guest one 'type="pvh"' 'cpus="0"' || give_up 'nothing to see'
check 'a grantee is created' window_guest two 'type="pvh"' 'cpus="1"' || give_up 'nothing to see'
A=$(domain one) B=$(domain two)
like 'a window is created' "$(a create $B 64)" 'rc 0 status 0 handle 0'
b dev-open >/dev/null
like 'it registers' "$(b dev-register $A 0 64)" ok
a fill 3 AAAAAAAA >/dev/null
like 'a page is issued' "$(a issue 0 20 3 0)" '*ok 1*'
b spin 20 >/dev/null
like 'it is revoked' "$(a revoke 0 20 0)" '*ok 1*'
ON_LIMIT=120
like 'it is issued, revoked and changed over and over' "$(a canary 0 20 3 $ROUNDS)" 'rounds [1-9]*'
seen=$(b spun stop)
like 'the reader sees nothing that it must not' "$seen" 'spins [1-9]* other 0'
note "$seen"

# Pitfall 1: an issue between the grantee's fault on a hole and its handling. On one processor it cannot come there.
b touch 64 >/dev/null
a churn 0 60 >/dev/null
sleep ${RACE_SECONDS:-20}
like 'issues race faults' "$(a churned stop)" 'rounds [1-9]* revoked [1-9]*'
like 'the grantee lives' "$(b touched stop)" 'touched [1-9]*'
complete
