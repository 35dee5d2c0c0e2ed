# title: containers with other user ids: keep-id, a map of ids, another user
# limit: 60

is 'keep-id has a network' "$(run 'tcp 198.51.100.1 7000' --userns keep-id)" 'client 192.0.2.2'
is 'the user id is kept' "$(run 'id -u' --userns keep-id)" 1234
is 'a map of ids has a network' "$(run 'tcp 198.51.100.1 7000' --uidmap 0:0:5000)" 'client 192.0.2.2'
is 'another user has a network' "$(run 'tcp 198.51.100.1 7000' --user 5:5)" 'client 192.0.2.2'
check 'a server with keep-id starts' start 'serve :: 8080' --userns keep-id --name web -p 8080:8080
check 'its port answers' outside tcp 192.0.2.2 8080
remove web >/dev/null
complete_scenario
