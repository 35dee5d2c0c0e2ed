//! Approval while a guest runs (`--ask`), with real clients: each waits for the answer, then goes on or fails.

use std::collections::BTreeMap;

use crate::support::egress::{DNSMASQ, LONG, OPENSSL};
use crate::support::mirror::{self, Client};
use crate::support::needs::Need;
use crate::support::world::FAR_V4;
use crate::{net, require};

/// Approves `a.test` at the mirrors' first ports. Denies the second ports, and all other names.
const ANSWER_SH: &str = "#!/bin/sh
case $RINGFENCE_ASK_RULE in a.test:82*) answer=deny ;; a.test:*) answer=run ;; *) answer=deny ;; esac
echo \"$(date +%s%N) $RINGFENCE_ASK_RULE $answer\" >> answers
echo $answer
";

#[test]
#[ignore = "long: each client in turn, three times"]
fn each_client_waits_for_the_answer_and_goes_on_or_fails() {
    require!(OPENSSL, DNSMASQ, Need::Program("git", "git"), Need::Program("dpkg-deb", "dpkg"));
    require!(Need::Program("python3", "python3"));
    let clients = mirror::installed_clients();
    let net = net!();
    let write = |name: &str, text: &str| std::fs::write(net.world.file(name), text).unwrap();
    write("http2.mjs", include_str!("../support/http2.mjs"));
    write("answer.sh", ANSWER_SH);
    let executable = std::os::unix::fs::PermissionsExt::from_mode(0o755);
    std::fs::set_permissions(net.world.file("answer.sh"), executable).unwrap();
    let mirror = mirror::start(&net.world, "a.test");
    let has_node = clients.iter().any(|client| client.name == "node");
    let over_http2 =
        has_node.then(|| net.world.outside(&["node", "http2.mjs", "log", FAR_V4, "8111", "8211"]));
    if let Some(server) = &over_http2 {
        server.wait_for_output("listening");
    }
    let mut script = "set +e\n".to_owned();
    for client in &clients {
        let Client { name, port, .. } = client;
        for (kind, host, port) in [
            ("allowed", "a.test".to_owned(), *port),
            ("name", format!("{name}.wild.test"), *port),
            ("port", "a.test".to_owned(), *port + 100),
        ] {
            let at = format!("at-{name}-{kind}");
            let command = client.command_for(&host, port).replace("{at}", &at);
            script += &format!(
                "mkdir {at}; {command} >said 2>&1; status=$?\n\
                 echo \"{name} {kind} $status $(date +%s%N) $(tail -n 1 said)\"\n"
            );
        }
    }
    let output =
        net.world.lone_guest("--name asks --ask exec:./answer.sh", &script).finish(4 * LONG);
    let answers = net.world.lab.read("answers");
    let of_node = over_http2.as_ref().map_or(String::new(), |server| server.stdout.text());
    let asked = mirror.stdout.text() + &of_node;
    let shown = format!("{}{}{answers}{asked}", output.stdout, output.stderr);
    let answered: BTreeMap<&str, u64> = answers
        .lines()
        .map(|line| line.split(' ').collect::<Vec<_>>())
        .map(|words| (words[1], words[0].parse().unwrap()))
        .collect();
    let requests: Vec<Vec<String>> = asked
        .lines()
        .filter(|line| *line != "listening")
        .map(|line| line.split(' ').map(str::to_owned).collect())
        .collect();
    // Neither a denied name nor a denied port had a request.
    assert!(requests.iter().all(|words| !words[2].contains("wild")), "{shown}");
    assert!(requests.iter().all(|words| words[1].starts_with("81")), "{shown}");
    let is_of_node = |words: &&Vec<String>| words[1] == "8111";
    let versions = requests.iter().filter(is_of_node).map(|words| words[4].as_str());
    assert_eq!(versions.collect::<Vec<_>>(), ["2.0"; 1][..usize::from(has_node)], "{shown}");
    let lines: Vec<Vec<&str>> =
        output.stdout.lines().map(|line| line.splitn(5, ' ').collect()).collect();
    assert_eq!(lines.len(), 3 * clients.len(), "{shown}");
    let ms = |from: u64, to: u64| to.saturating_sub(from) as f64 / 1e6;
    for (client, lines) in clients.iter().zip(lines.chunks(3)) {
        let Client { name, port, .. } = client;
        for line in lines {
            let (kind, status) = (line[1], line[2]);
            let rule = match kind {
                "allowed" => format!("a.test:{port}"),
                "name" => format!("{name}.wild.test:443"),
                _ => format!("a.test:{}", port + 100),
            };
            let asked = answered.get(rule.as_str());
            let asked = *asked.unwrap_or_else(|| panic!("{rule} was not asked for: {shown}"));
            assert_eq!(status == "0", kind == "allowed", "{line:?}: {shown}");
            let ended: u64 = line[3].parse().unwrap();
            assert!(ended > asked, "{line:?}: {shown}");
            if kind == "allowed" {
                let port = port.to_string();
                let first = requests.iter().find(|words| words[1] == port);
                let first: u64 = first.unwrap()[0].parse().unwrap();
                assert!(first > asked, "{name} did not wait for the answer: {shown}");
                println!("{name}: request {:.1} ms after the approval", ms(asked, first));
            } else {
                println!(
                    "{name}: end {:.1} ms after the denied {kind}: {:?}",
                    ms(asked, ended),
                    line.get(4)
                );
            }
        }
    }
    drop((mirror.end(), over_http2.map(crate::support::Running::end)));
    net.end();
}
