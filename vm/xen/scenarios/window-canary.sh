# title: a spinning reader never sees what a page holds after its revoke (wants two processors)
# set: name
# machine: xen-pvh
# limit: 900
# driver: window-tests

. /vm/xen/window.sh

# On one processor the change of guests empties the TLB: only two show that the revoke does.
ROUNDS=${ROUNDS:-2000}

check 'a granter is created' create_window_guest one 'type="pvh"' 'cpus="0"' || give_up 'nothing to see'
check 'a grantee is created' create_window_guest two 'type="pvh"' 'cpus="1"' || give_up 'nothing to see'
granter_id=$(domain_id one) grantee_id=$(domain_id two)
matches 'a window is created' "$(granter create $grantee_id 64)" 'rc 0 status 0 handle 0'
grantee dev-open >/dev/null
matches 'it registers' "$(grantee dev-register $granter_id 0 64)" ok
granter fill 3 AAAAAAAA >/dev/null
matches 'a page is issued' "$(granter issue 0 20 3 0)" '*ok 1*'
grantee spin 20 >/dev/null
matches 'it is revoked' "$(granter revoke 0 20 0)" '*ok 1*'
ON_LIMIT=120
matches 'it is issued, revoked and changed over and over' "$(granter canary 0 20 3 $ROUNDS)" 'rounds [1-9]*'
seen=$(grantee spun stop)
matches 'the reader sees nothing that it must not' "$seen" 'spins [1-9]* other 0'
note "$seen"

# Pitfall 1: an issue between the grantee's fault on a hole and its handling. On one processor it cannot come there.
grantee touch 64 >/dev/null
granter churn 0 60 >/dev/null
sleep ${RACE_SECONDS:-20}
matches 'issues race faults' "$(granter churned stop)" 'rounds [1-9]* revoked [1-9]*'
matches 'the grantee lives' "$(grantee touched stop)" 'touched [1-9]*'
complete_scenario
