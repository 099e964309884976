// What a cubin says of its kernels: their names, and the size and place of each argument, as NVRTC wrote them.
//
// A cubin is an ELF file. For each kernel it has a section ".nv.info.NAME" of records; those of kind 0x17 describe one
// argument each. So a test that compares what a launch packed with this compares it with the compiler's own account.
#pragma once
#include <elf.h>

#include <cstdint>
#include <cstring>
#include <map>
#include <string>
#include <vector>

struct Argument {
    uint32_t offset = 0, bytes = 0;
};
using Arguments = std::vector<Argument>;

template <class T>
T at(const std::string& file, size_t offset) {
    T value{};
    if (offset + sizeof(T) <= file.size()) memcpy(&value, file.data() + offset, sizeof(T));
    return value;
}

inline Arguments arguments_of(const std::string& records) {
    std::map<uint16_t, Argument> found;
    for (size_t at_byte = 0; at_byte + 4 <= records.size();) {
        auto format = at<uint8_t>(records, at_byte), kind = at<uint8_t>(records, at_byte + 1);
        auto size = format == 4 ? at<uint16_t>(records, at_byte + 2) : 0;  // otherwise the value is in the record's head
        if (kind == 0x17 && format == 4 && size == 12) {
            auto packed = at<uint32_t>(records, at_byte + 12);
            found[at<uint16_t>(records, at_byte + 8)] = {at<uint16_t>(records, at_byte + 10), packed >> 18};
        }
        at_byte += 4 + size;
    }
    Arguments answer;
    for (auto& [ordinal, argument] : found) answer.push_back(argument);
    return answer;
}

// The kernels of a cubin; none if it is not one. The file's length is not given to cuLibraryLoadData, so it is taken
// from where its tables end.
inline std::map<std::string, Arguments> kernels_of(const void* image) {
    std::map<std::string, Arguments> answer;
    if (memcmp(image, ELFMAG, SELFMAG) != 0) return answer;
    auto* head = static_cast<const Elf64_Ehdr*>(image);
    size_t length = head->e_shoff + size_t(head->e_shnum) * head->e_shentsize;
    auto* sections = reinterpret_cast<const Elf64_Shdr*>(static_cast<const char*>(image) + head->e_shoff);
    for (int i = 0; i < head->e_shnum; i++)
        if (sections[i].sh_type != SHT_NOBITS && sections[i].sh_offset + sections[i].sh_size > length)
            length = sections[i].sh_offset + sections[i].sh_size;
    std::string file(static_cast<const char*>(image), length);
    const char* names = file.data() + sections[head->e_shstrndx].sh_offset;
    const std::string info = ".nv.info.";
    for (int i = 0; i < head->e_shnum; i++) {
        std::string name = names + sections[i].sh_name;
        if (name.rfind(info, 0) != 0) continue;
        answer[name.substr(info.size())] = arguments_of(file.substr(sections[i].sh_offset, sections[i].sh_size));
    }
    return answer;
}
