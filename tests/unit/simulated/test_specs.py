"""Which nodes a fleet has."""

from pathlib import Path

import pytest

from gpupool_agent.simulated.specs import (
    SpecError,
    checked,
    parse_count,
    parse_node,
    read_nodes_csv,
)

OPENB = (
    Path(__file__).parents[3].parent / "shared" / "data" / "openb" / "openb_node_list_gpu_node.csv"
)


def test_a_node_has_a_kind_a_name_and_options() -> None:
    spec = parse_node("gb200-tray:tray-01,domain=nvl-a,clique=7,label.rack=r1")
    assert spec.node_id == "tray-01"
    assert spec.machine.name == "gb200-tray"
    assert (spec.domain, spec.clique, spec.labels) == ("nvl-a", 7, {"rack": "r1"})


def test_a_custom_node_is_described_on_the_spot() -> None:
    spec = parse_node(
        "custom:c1,model=P100,gpus=2,memory_mib=16384,cpu_milli=64000,host_memory_mib=262144"
    )
    assert spec.machine.gpu.name == "P100"
    assert spec.machine.gpu.memory_total_mib == 16384
    assert len(spec.machine.slots) == 2


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("dgx-h100", "is not KIND:NODE_ID"),
        ("dgx-z:n", "'dgx-z' is not described"),
        ("dgx-h100:", "node id ''"),
        ("dgx-h100:a/b", "node id 'a/b'"),
        ("dgx-h100:n,rack=1", "'rack' in .* is no option"),
        ("dgx-h100:n,domain", "'domain' in .* is not KEY=VALUE"),
        ("dgx-h100:n,domain=a,domain=b", "once a key"),
        ("gb200-tray:n,clique=-1", "clique is '-1'; accepted are 0 to 4294967295"),
        ("custom:n,model=X", "a custom node needs gpus"),
    ],
)
def test_a_bad_node_is_refused_with_what_is_accepted(text: str, message: str) -> None:
    with pytest.raises(SpecError, match=message):
        parse_node(text)


def test_counted_trays_fill_domains_of_eighteen() -> None:
    specs = parse_count("gb200-tray=37")
    assert len({spec.node_id for spec in specs}) == 37
    domains = [spec.domain for spec in specs]
    assert [domains.count(domain) for domain in sorted(set(domains))] == [18, 18, 1]


@pytest.mark.parametrize("text", ["dgx-h100", "dgx-h100=0", "dgx-h100=x", "dgx-h100=20001"])
def test_a_bad_count_is_refused(text: str) -> None:
    with pytest.raises(SpecError):
        parse_count(text)


def test_twins_and_empty_fleets_are_refused() -> None:
    node = parse_node("gb10:n")
    with pytest.raises(SpecError, match="'n' is there twice"):
        checked([node, node])
    with pytest.raises(SpecError, match="0 nodes"):
        checked([])


def test_a_bad_line_of_a_host_list_is_named(tmp_path: Path) -> None:
    path = tmp_path / "nodes.csv"
    path.write_text("sn,cpu_milli,memory_mib,gpu,model\nn1,1000,1024,1,T4\nn2,1000,1024,x,T4\n")
    with pytest.raises(SpecError, match=r"nodes\.csv, line 3: .*'x'"):
        read_nodes_csv(path)


@pytest.mark.skipif(not OPENB.exists(), reason="the shared trace is not here")
def test_the_openb_hosts_are_read_as_they_are() -> None:
    specs = checked(read_nodes_csv(OPENB))
    assert len(specs) == 1213
    assert sum(len(spec.machine.slots) for spec in specs) == 6212
    first = specs[0]
    assert (first.node_id, first.machine.gpu.name) == ("openb-node-0000", "P100")
    assert (first.machine.cpu_milli, first.machine.host_memory_mib) == (64000, 262144)
