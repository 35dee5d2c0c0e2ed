//! Network policies of Cilium: `toFQDNs`, `toCIDR` and `toCIDRSet` of egress rules, with `toPorts`.
//!
//! | Cilium | rule |
//! |---|---|
//! | `matchName: a.org` | `a.org` |
//! | `matchPattern: "**.a.org"` | `*.a.org` |
//! | `matchPattern: "*.a.org"`, one label | `*.a.org`, any depth, with a remark |
//! | `toCIDR: [10.0.0.0/8]` | `10.0.0.0/8` |
//! | `ports: [{port: "80", endPort: 90, protocol: TCP}]` | `:80-90/tcp` |
//!
//! An egress rule that also restricts requests (`rules`, `serverNames`) is not converted: the result would allow more.

use anyhow::bail;
use ringfence_policy::Action;

use super::Imported;
use super::yaml::{self, Node};

/// Kinds of objects that are policies.
const KINDS: [&str; 2] = ["CiliumNetworkPolicy", "CiliumClusterwideNetworkPolicy"];
/// Destinations of the cluster, which a policy of a guest cannot name.
const OF_CLUSTER: [&str; 7] =
    ["toEndpoints", "toEntities", "toServices", "toGroups", "toNodes", "toRequires", "icmps"];

/// Converts the policies of a text.
///
/// # Errors
///
/// Returns the reason for which it contains no policy.
pub(super) fn convert(text: &str) -> anyhow::Result<Imported> {
    let documents = yaml::documents(text)?;
    let mut imported = Imported::default();
    let mut policies = 0;
    for document in &documents {
        // `kubectl get -o yaml` prints a list.
        let objects = document.get("items").map_or(std::slice::from_ref(document), Node::items);
        for object in objects {
            let kind = object.get("kind").and_then(Node::text).unwrap_or_default();
            if KINDS.contains(&kind) {
                policies += 1;
                policy(&mut imported, object);
            } else if !kind.is_empty() {
                let text = format!("`kind: {kind}` is no CiliumNetworkPolicy");
                imported.remark(&place(object), &text);
            }
        }
    }
    if policies == 0 {
        bail!(
            "there is no object with `kind: CiliumNetworkPolicy`: name a file of `kubectl get ciliumnetworkpolicy -o yaml`, \
             or say `--from srt`"
        );
    }
    Ok(imported)
}

fn place(node: &Node) -> String {
    format!("line {}", node.line)
}

fn policy(imported: &mut Imported, object: &Node) {
    let specs = object.get("specs").map(Node::items).unwrap_or_default();
    for spec in object.get("spec").into_iter().chain(specs) {
        for (key, value) in spec.entries() {
            match key.as_str() {
                "egress" => value.items().iter().for_each(|of| rule(imported, Action::Allow, of)),
                "egressDeny" => {
                    value.items().iter().for_each(|of| rule(imported, Action::Deny, of))
                }
                "endpointSelector" | "nodeSelector" => {
                    let text =
                        format!("{key} selects no guest: apply the policy to those that it means");
                    imported.remark(&place(value), &text);
                }
                "description" | "labels" => {}
                _ => imported.remark(&place(value), &format!("{key} has no rule")),
            }
        }
    }
}

/// Converts one egress rule.
fn rule(imported: &mut Imported, action: Action, rule: &Node) {
    let mut destinations: Vec<(String, String)> = Vec::new();
    let mut has_others = false;
    for (key, value) in rule.entries() {
        match key.as_str() {
            "toFQDNs" => {
                let names = value.items().iter().filter_map(|name| destination(imported, name));
                destinations.extend(names.collect::<Vec<_>>());
            }
            "toCIDR" => {
                let prefixes = value.items().iter();
                destinations
                    .extend(prefixes.filter_map(|node| Some((place(node), prefix(node.text()?)))));
            }
            "toCIDRSet" => {
                let prefixes = value.items().iter().filter_map(|set| of_set(imported, set));
                destinations.extend(prefixes.collect::<Vec<_>>());
            }
            "toPorts" => continue,
            key if OF_CLUSTER.contains(&key) => {
                let why = match is_about_names(rule) {
                    true => "name servers need no rule",
                    false => "a guest has no such destinations: name theirs",
                };
                imported.remark(&place(rule), &format!("{key}: {why}"));
            }
            _ => imported.remark(&place(value), &format!("{key} has no rule")),
        }
        has_others = true;
    }
    if !has_others {
        let text = "any destination: name it, or say `default = \"allow\"`";
        return imported.remark(&place(rule), text);
    }
    if destinations.is_empty() {
        return;
    }
    let Some(ports) = ports(imported, rule.get("toPorts")) else { return };
    for (place, host) in destinations {
        for ports in &ports {
            imported.add(action, &place, &format!("{host}{ports}"));
        }
    }
}

/// Returns `true` if a rule lets endpoints ask name servers.
fn is_about_names(rule: &Node) -> bool {
    let ports = rule.get("toPorts").map(Node::items).unwrap_or_default();
    ports.iter().any(|ports| ports.get("rules").is_some_and(|rules| rules.get("dns").is_some()))
}

/// Returns the target of a rule for a name or a pattern, with its place.
fn destination(imported: &mut Imported, name: &Node) -> Option<(String, String)> {
    let place = place(name);
    if let Some(name) = name.get("matchName").and_then(Node::text) {
        return Some((place, name.trim_end_matches('.').to_owned()));
    }
    let Some(pattern) = name.get("matchPattern").and_then(Node::text) else {
        imported.remark(&place, "neither matchName nor matchPattern");
        return None;
    };
    let pattern = pattern.trim_end_matches('.');
    if let Some(name) = pattern.strip_prefix("**.").filter(|name| !name.contains('*')) {
        return Some((place, format!("*.{name}")));
    }
    match pattern.strip_prefix("*.") {
        Some(name) if !name.contains('*') => {
            let text =
                format!("`{pattern}` is one label in Cilium; the rule also covers deeper names");
            imported.remark(&place, &text);
        }
        None if !pattern.contains('*') => {}
        _ => {
            let text = format!(
                "pattern `{pattern}`: a rule has a wildcard for whole labels at the front alone; name the hosts"
            );
            imported.remark(&place, &text);
            return None;
        }
    }
    Some((place, pattern.to_owned()))
}

/// Writes a prefix as a rule does.
fn prefix(cidr: &str) -> String {
    match cidr.split_once('/') {
        Some((ip, len)) if ip.contains(':') => format!("[{ip}]/{len}"),
        None if cidr.contains(':') => format!("[{cidr}]"),
        _ => cidr.to_owned(),
    }
}

/// Returns the prefix of a set without exceptions, with its place.
fn of_set(imported: &mut Imported, set: &Node) -> Option<(String, String)> {
    let place = place(set);
    let other = set.entries().iter().find(|(key, _)| key != "cidr");
    if let Some((key, _)) = other {
        imported.remark(&place, &format!("toCIDRSet with {key}: write its prefixes as rules"));
        return None;
    }
    Some((place, prefix(set.get("cidr")?.text()?)))
}

/// Returns the ends of rules for lists of ports: `:80,443/tcp`. `None` if the rule cannot be converted.
fn ports(imported: &mut Imported, lists: Option<&Node>) -> Option<Vec<String>> {
    let lists = lists.map(Node::items).unwrap_or_default();
    if lists.is_empty() {
        return Some(vec![String::new()]);
    }
    let mut by_protocol: Vec<(&str, Vec<String>)> =
        ["", "/tcp", "/udp"].map(|end| (end, Vec::new())).into();
    for list in lists {
        if let Some((key, value)) = list.entries().iter().find(|(key, _)| key != "ports") {
            let text = format!(
                "toPorts with {key}: a rule restricts no requests, so this one is left out"
            );
            imported.remark(&place(value), &text);
            return None;
        }
        let items = list.get("ports").map(Node::items).unwrap_or_default();
        if items.is_empty() {
            by_protocol[0].1.push(String::new());
        }
        for port in items {
            let (end, range) = port_range(imported, port)?;
            let of = by_protocol.iter_mut().find(|(known, _)| *known == end)?;
            of.1.push(range);
        }
    }
    let ends = by_protocol.into_iter().filter(|(_, ranges)| !ranges.is_empty());
    let end = |(end, ranges): (&str, Vec<String>)| match ranges.iter().any(String::is_empty) {
        true => end.to_owned(),
        false => format!(":{}{end}", ranges.join(",")),
    };
    Some(ends.map(end).collect())
}

/// Returns the protocol and the port or range of an entry; all ports are the empty range.
fn port_range(imported: &mut Imported, port: &Node) -> Option<(&'static str, String)> {
    let of = |key: &str| port.get(key).and_then(Node::text).unwrap_or_default();
    let end = match of("protocol").to_ascii_uppercase().as_str() {
        "" | "ANY" => "",
        "TCP" => "/tcp",
        "UDP" => "/udp",
        other => {
            let text = format!("protocol {other} has no rule, so this one is left out");
            imported.remark(&place(port), &text);
            return None;
        }
    };
    let (first, last) = (of("port"), of("endPort"));
    let number = |text: &str| text.parse::<u16>().ok();
    match (number(first), number(last)) {
        (Some(0), _) => Some((end, String::new())),
        (Some(first), Some(last)) if last > 0 => Some((end, format!("{first}-{last}"))),
        (Some(first), _) => Some((end, first.to_string())),
        (None, _) => {
            let text = format!("port `{first}` is no number, so this rule is left out");
            imported.remark(&place(port), &text);
            None
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Policy in the form of Cilium's documentation.
    const POLICY: &str = r#"apiVersion: "cilium.io/v2"
kind: CiliumNetworkPolicy
metadata:
  name: "fqdn"
spec:
  endpointSelector:
    matchLabels:
      org: empire
  egress:
    - toEndpoints:
      - matchLabels:
          "k8s:k8s-app": kube-dns
      toPorts:
        - ports:
           - port: "53"
             protocol: ANY
          rules:
            dns:
              - matchPattern: "*"
    - toFQDNs:
        - matchName: "my-remote-service.com"
        - matchPattern: "*.one.org"
        - matchPattern: "**.deep.org."
        - matchPattern: "api-*.org"
      toPorts:
        - ports:
           - {port: "443", protocol: TCP}
           - {port: 8000, endPort: 8010, protocol: TCP}
           - {port: "53", protocol: UDP}
    - toFQDNs: [{matchName: plain.org}]
    - toCIDR: [20.1.1.1/32, "2001:db8::/32"]
      toCIDRSet: [{cidr: 10.0.0.0/8}, {cidr: 172.16.0.0/12, except: [172.16.1.0/24]}]
      toPorts: [{ports: [{port: "0"}]}]
  egressDeny:
    - toCIDR: [10.1.0.0/16]
"#;

    #[test]
    fn names_prefixes_and_ports_become_rules() {
        let imported = convert(POLICY).unwrap();
        let expected = [
            "my-remote-service.com:443,8000-8010/tcp",
            "my-remote-service.com:53/udp",
            "*.one.org:443,8000-8010/tcp",
            "*.one.org:53/udp",
            "*.deep.org:443,8000-8010/tcp",
            "*.deep.org:53/udp",
            "plain.org",
            "20.1.1.1",
            "[2001:db8::]/32",
            "10.0.0.0/8",
        ];
        assert_eq!(imported.allow, expected);
        assert_eq!(imported.deny, ["10.1.0.0/16"]);
        let remarks = imported.remarks.join("\n");
        for part in [
            "line 10: toEndpoints: name servers need no rule",
            "`*.one.org` is one label in Cilium",
            "pattern `api-*.org`",
            "toCIDRSet with except",
            "endpointSelector selects no guest",
        ] {
            assert!(remarks.contains(part), "{part}: {remarks}");
        }
        assert_eq!(imported.remarks.len(), 5, "{remarks}");
    }

    #[test]
    fn rule_that_would_allow_more_is_left_out() {
        for ports in [
            "[{ports: [{port: '80'}], rules: {http: [{method: GET}]}}]",
            "[{ports: [{port: '443'}], serverNames: [a.org]}]",
            "[{ports: [{port: https}]}]",
            "[{ports: [{port: '1', protocol: SCTP}]}]",
        ] {
            let text = format!(
                "kind: CiliumNetworkPolicy\nspec: {{egress: [{{toFQDNs: [{{matchName: a.org}}], toPorts: {ports}}}]}}"
            );
            let imported = convert(&text).unwrap();
            assert!(imported.allow.is_empty() && imported.remarks.len() == 1, "{imported:?}");
        }
        let text = "kind: CiliumNetworkPolicy\nspecs: [{egress: [{}, {toPorts: [{ports: [{port: '80'}]}]}, {toEntities: [world]}]}]";
        let imported = convert(text).unwrap();
        assert!(imported.allow.is_empty() && imported.remarks.len() == 2, "{imported:?}");
    }

    #[test]
    fn list_of_kubectl_is_converted_and_other_objects_are_named() {
        let text = "kind: List\nitems:\n- kind: CiliumNetworkPolicy\n  spec: {egress: [{toFQDNs: [{matchName: a.org}]}]}\n\
                    - kind: NetworkPolicy\n";
        let imported = convert(text).unwrap();
        assert_eq!(imported.allow, ["a.org"]);
        assert!(imported.remarks[0].contains("kind: NetworkPolicy"), "{imported:?}");
        let error = convert("kind: NetworkPolicy").unwrap_err().to_string();
        assert!(error.contains("kubectl get") && error.contains("--from srt"), "{error}");
    }
}
